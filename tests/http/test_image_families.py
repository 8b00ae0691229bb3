"""Images of prompts in the families beside Qwen3.5 (test_images.py): tiny random models, a token for each byte, and templates that write
for an image what those of the published models write."""

import base64
import json
import struct
import subprocess
import zlib
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from conftest import BINARY, PATIENCE, ROOT
from test_images import base, image, png, scores, text
from test_selftest import INCONCLUSIVE
from tiny_models import golden_config, tokenizer

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}

TEMPLATE = """{% for message in messages %}<|turn|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}%s{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|turn|>model
{% endif %}"""


class Gemma3:
    golden = "gemma3-vision"
    special = ["<|turn|>", "<|end|>", "<image_soft_token>", "<start_of_image>", "<end_of_image>"]
    ids = {"image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"}
    written = "<start_of_image>"
    processor = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 24, "width": 24}, "image_seq_length": 9, "resample": 2,
                 "do_pan_and_scan": None, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    # Rows and the marks around them: a line break is a token here.
    tokens = {(64, 64): 9 + 6, (24, 24): 9 + 6, (16, 200): 9 + 6}
    # The rows of an image take a step of their own at least.
    batched = 16
    # Whether the reference takes them; the longest of those that selftest tries.
    shapes = {(1000, 1): True, (1, 1000): True}
    longest = 200


class Qwen2_5VL:
    golden = "qwen2_5-vl"
    special = ["<|turn|>", "<|end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    ids = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
           "vision_end_token_id": "<|vision_end|>"}
    written = "<|vision_start|><|image_pad|><|vision_end|>"
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 64, "max_pixels": 4096, "patch_size": 4,
                 "temporal_patch_size": 2, "merge_size": 2} | CLIP
    tokens = {(64, 64): 64 + 2, (24, 40): 15 + 2, (200, 200): 64 + 2}
    batched = 16
    shapes = {(200, 1): True, (1, 200): True, (201, 1): False, (1, 201): False}
    longest = 200


class Mistral3:
    golden = "mistral3-vision"
    special = ["<|turn|>", "<|end|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    ids = {"image_token_index": "[IMG]"}
    written = "[IMG]"
    processor = {"image_processor_type": "PixtralImageProcessorFast", "size": {"longest_edge": 64}, "patch_size": 4} | CLIP
    # A mark behind each line.
    tokens = {(64, 64): 8 * 9, (24, 40): 5 * 4, (128, 64): 4 * 9}
    batched = 16
    shapes = {(64, 1): True, (1, 64): True, (65, 1): False, (1, 65): False}
    longest = 64


FAMILIES = {"gemma3": Gemma3, "qwen2.5-vl": Qwen2_5VL, "mistral3": Mistral3}


def write(directory, of) -> None:
    """The model's files, but for its weights."""
    config = golden_config(of.golden)
    ids = {name: 256 + index for index, name in enumerate(of.special)}
    config["text_config"] |= {"vocab_size": 320, "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": ids["<|end|>"]}
    config |= {field: ids[name] for field, name in of.ids.items()} | {"eos_token_id": ids["<|end|>"]}
    files = {"config": config, "preprocessor_config": of.processor, "tokenizer": tokenizer(of.special), "tokenizer_config": {"eos_token": "<|end|>"}}
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("%s", of.written))


def flags(directory, of) -> list[str]:
    return [str(directory), "--load-format", "dummy", "--served-model-name", "tiny", "--max-num-seqs", "8",
            "--max-num-batched-tokens", str(of.batched), "--limit-mm-per-prompt", '{"image": 3}']


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, start, tmp_path_factory):
    directory, of = tmp_path_factory.mktemp(request.param), FAMILIES[request.param]
    write(directory, of)
    with start(*flags(directory, of)) as server:
        yield server, of


def ask(server, *content, salt="", **more):
    extra = {"ignore_eos": True} | ({"cache_salt": salt} if salt else {})
    return server.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": list(content)}], max_tokens=12,
                                                 temperature=0, logprobs=True, extra_body=extra, **more)


def test_usage_counts_the_tokens_of_images(served):
    server, of = served
    words = ask(server, text("What is it?")).usage.prompt_tokens
    for (width, height), tokens in of.tokens.items():
        assert ask(server, image(1, width, height), text("What is it?")).usage.prompt_tokens == words + tokens, (width, height)
    sizes = list(of.tokens)[:2]
    two = ask(server, image(1, *sizes[0]), text("What is it?"), image(2, *sizes[1])).usage.prompt_tokens
    assert two == words + sum(of.tokens[size] for size in sizes)


def test_what_an_image_shows_is_seen(served):
    server, _ = served
    first, again, other = (ask(server, image(seed), text("What is it? " * 3)) for seed in (11, 11, 12))
    assert scores(first) == scores(again) and scores(first) != scores(other)
    cached = lambda answer: answer.usage.prompt_tokens_details.cached_tokens
    assert cached(again) > cached(other)


def test_text_does_not_depend_on_the_load(served):
    server, _ = served
    # With a cache of their own both times, images are computed again. Prompts are longer than a step.
    of = lambda seed, salt: scores(ask(server, text("Look: " * (seed % 5)), image(seed), text(f"Image {seed}?"), salt=salt))
    alone = [of(seed, "alone") for seed in range(20, 26)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda seed: of(seed, "together"), range(20, 26))) == alone


def test_images_that_cannot_be_taken_are_refused(served):
    server, _ = served
    for url, named in [("data:image/png;base64,AAAA", "not an image"), ("data:image/png;base64," + base(1)[:4000], "cannot be decoded")]:
        with pytest.raises(openai.BadRequestError, match=named):
            ask(server, {"type": "image_url", "image_url": {"url": url}}, text("What is it?"))
    with pytest.raises(openai.BadRequestError, match="3"):
        ask(server, *(image(seed, 8, 8) for seed in range(4)), text("What are they?"))


def test_marks_in_texts_of_messages_are_text(served):
    server, of = served
    answer = ask(server, text(f"What is {of.written} and {''.join(of.special)}?"), image(1))
    assert answer.choices[0].message.content is not None


def test_the_encoders_memory_is_reserved(served):
    server, _ = served
    memory = server.http.get("/memory").raise_for_status().json()
    components = {line["name"]: line["bytes"] for line in memory["profile"]["ready"]["components"]}
    assert components["encoder"] > 0
    model = server.http.get("/v1/models").raise_for_status().json()["data"][0]
    assert model["input_modalities"] == ["text", "image"]


def test_ranks_see_what_one_device_sees(served, start, tmp_path):
    server, of = served
    write(tmp_path, of)
    words = lambda server, *seeds: ask(server, *(image(seed) for seed in seeds), text("What is it?")).choices[0].message.content
    with start(*flags(tmp_path, of), "--tensor-parallel-size", "2") as ranks:
        for seeds in [(1,), (2,), (3, 1, 2)]:
            assert words(ranks, *seeds) == words(server, *seeds)
        components = [rank["components"] for rank in ranks.http.get("/memory").raise_for_status().json()["ranks"]]
    assert len(components) == 2 and components[0]["encoder"] == components[1]["encoder"] > 0


GOLDEN_IMAGES = ROOT / "tests" / "golden" / "images"


def test_files_are_read_as_the_reference_reads_them_or_refused(served):
    """Animated, in CMYK, of 16 bits, transparent, turned by EXIF, cut, damaged, or none at all."""
    server, _ = served

    def status_and_reason(name: str) -> tuple[int, str]:
        url = "data:image/png;base64," + base64.b64encode((GOLDEN_IMAGES / name).read_bytes()).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, text("What is it?")]
        answer = server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], "max_tokens": 1})
        return answer.status_code, "" if answer.is_success else answer.json()["error"]["message"]

    pictures = json.loads((GOLDEN_IMAGES / "pictures.json").read_text())["pictures"]
    with ThreadPoolExecutor(4) as pool:
        for name, (status, reason) in zip(pictures, pool.map(status_and_reason, pictures)):
            if "error" in pictures[name]:
                assert status == 400 and ("cannot be decoded" in reason or "not an image" in reason), (name, status, reason)
            else:
                assert status == 200, (name, status, reason)


def test_shapes_are_those_that_the_reference_takes(served):
    """Of 200 to 1 and beyond, and of a size that no memory holds."""
    server, of = served
    for (width, height), taken in of.shapes.items():
        if taken:
            assert ask(server, image(1, width, height), text("What is it?")).usage.prompt_tokens > 0
        else:
            with pytest.raises(openai.BadRequestError, match="at most 200 times as long|at most 64 times as long"):
                ask(server, image(1, width, height), text("What is it?"))
    bomb = bytearray(png(1, 8, 8))
    bomb[16:24] = struct.pack(">II", 60_000, 60_000)
    bomb[29:33] = struct.pack(">I", zlib.crc32(bomb[12:29]))
    with pytest.raises(openai.BadRequestError, match="60000 x 60000 pixels; at most"):
        ask(server, {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(bomb).decode()}}, text("What is it?"))


def test_clients_load_a_server_with_pictures(served, tmp_path):
    """`selftest` with the largest pictures in all rows, then with others, and `bench serve` with images of two sizes."""
    server, of = served
    seconds = 2
    for _ in range(4):
        selftest = [BINARY, "selftest", "--url", server.url, "--stages", "pictures", "--duration", f"{seconds}s"]
        done = subprocess.run(selftest, capture_output=True, text=True, timeout=PATIENCE)
        verdict = json.loads(done.stdout)
        if done.returncode != INCONCLUSIVE:
            break
        seconds = verdict["suggested_duration"]
    assert done.returncode == 0 and verdict["findings"] == [], done.stderr + server.tail()
    assert verdict["pictures"]["most"] == 3 and verdict["pictures"]["ratio"] == of.longest
    # All clients had an answer about a picture of the largest size.
    assert verdict["requests"]["pictures"] >= 10 and [goal["limit"] for goal in verdict["goals"]] == ["largest pictures"]
    assert verdict["device_allocs_after_ready"] == 0 and verdict["kv_blocks_at_end"] == 0

    report = tmp_path / "report.json"
    bench = [BINARY, "bench", "serve", "--base-url", server.url, "--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "4",
             "--ignore-eos"]
    images = ["--dataset-name", "random-mm", "--random-mm-base-items-per-request", "2", "--random-mm-limit-mm-per-prompt", '{"image": 2}',
              "--random-mm-bucket-config", "{(24, 40, 1): 0.5, (64, 64, 1): 0.5}", "--output-json", report]
    done = subprocess.run([*bench, *images], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and "Image throughput" in done.stdout, done.stderr
    figures = json.loads(report.read_text())
    assert (figures["completed"], figures["total_images"]) == (6, 12) and figures["image_throughput"] > 0 and figures["mean_ttft_ms"] > 0
    # A letter and the space before it are a token each.
    marks = [min(of.tokens.values()), max(*of.tokens.values(), 15)]
    assert 6 * (20 + 2 * marks[0]) < figures["total_input_tokens"] < 6 * (20 + 2 * marks[1] + 40)
    done = subprocess.run([*bench, "--random-mm-base-items-per-request", "2"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode != 0 and "--dataset-name random-mm" in done.stderr, done.stderr


def test_throughput_is_measured_with_images(tmp_path):
    write(tmp_path, Mistral3)
    report = tmp_path / "report.json"
    bench = [BINARY, "bench", "throughput", tmp_path, "--load-format", "dummy", "--device-lock-dir", tmp_path, "--no-profile-cache", "--max-num-seqs", "4",
             "--num-prompts", "6", "--input-len", "20", "--output-len", "4", "--output-json", report]
    images = ["--dataset-name", "random-mm", "--random-mm-base-items-per-request", "2", "--random-mm-bucket-config", "{(40, 24, 1): 1}"]
    done = subprocess.run([*bench, *images], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and "Image throughput" in done.stdout, done.stderr
    figures = json.loads(report.read_text())
    assert figures["total_images"] == 12 and figures["total_prompt_tokens"] == 6 * (20 + 2 * Mistral3.tokens[24, 40])
    for flags, named in [([*images, "--limit-mm-per-prompt", '{"image": 0}'], "served for text alone"), (images[2:], "--dataset-name random-mm")]:
        done = subprocess.run([*bench, *flags], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode != 0 and named in done.stderr, done.stderr


def test_text_alone_is_served_as_before(start, tmp_path):
    write(tmp_path, Gemma3)
    with start(str(tmp_path), "--load-format", "dummy", "--served-model-name", "tiny", "--limit-mm-per-prompt", '{"image": 0}',
               "--max-num-batched-tokens", "8", "--max-num-seqs", "8") as server:
        components = server.http.get("/memory").raise_for_status().json()["profile"]["ready"]["components"]
        assert sum(line["bytes"] for line in components if line["name"] == "encoder") == 0
        assert ask(server, text("What is it?")).choices[0].message.content is not None
        with pytest.raises(openai.BadRequestError, match="image"):
            ask(server, image(1), text("What is it?"))


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize("flags, named", [
    (["--device", "cpu", "--max-num-batched-tokens", "32", "--max-num-seqs", "32"], "cannot hold the 9 of an image, which see each other, "
     "beside one of each other request that may run (--max-num-seqs 32); use at least 40"),
])
def test_images_that_were_asked_for_and_cannot_be_served_end_a_start(tmp_path, flags, named, ranks):
    write(tmp_path, Gemma3)
    plan = [BINARY, "plan", str(tmp_path), "--load-format", "dummy", "--tensor-parallel-size", ranks, *flags]
    ended = subprocess.run(plan, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode != 0 and named in ended.stderr, ended.stderr


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_gpus_are_planned_with_an_encoder(tmp_path, family, ranks):
    write(tmp_path, FAMILIES[family])
    flags = ["--device", "cuda", "--device-memory", "80GiB", "--tensor-parallel-size", ranks, "--json"]
    ended = subprocess.run([BINARY, "plan", str(tmp_path), "--load-format", "dummy", *flags], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    parts = {part["name"]: part["bytes"] for part in json.loads(ended.stdout)["ready"]["components"]}
    assert parts["encoder"] > 0, parts
