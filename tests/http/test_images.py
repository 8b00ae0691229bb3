"""Images of prompts, with the chat template and the processor of Qwen3.5, random weights, and a token for each byte."""

import base64
import json
import random
import struct
import subprocess
import zlib
from concurrent.futures import ThreadPoolExecutor

import anthropic
import openai
import pytest

from conftest import BINARY, PATIENCE
from tiny_models import DATA, golden_config, tokenizer

MODEL = "qwen3.5"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
# Sides of merged patches, in pixels.
ROW = 8
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "size": {"shortest_edge": ROW**2, "longest_edge": 64 * ROW**2},
    "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}


def png(seed: int, width: int, height: int) -> bytes:
    """Noise."""
    rng = random.Random(seed)
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    lines = b"".join(b"\0" + rng.randbytes(3 * width) for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def base(seed: int, width: int = 64, height: int = 64) -> str:
    return base64.b64encode(png(seed, width, height)).decode()


def write(directory) -> None:
    """The model's files, but for its weights."""
    config = golden_config("qwen3_5-vision")
    ids = {name.strip("<|>"): 256 + index for index, name in enumerate(SPECIAL)}
    config["text_config"] |= {"vocab_size": 320, "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": ids["im_end"]}
    config |= {"image_token_id": ids["image_pad"], "video_token_id": ids["video_pad"], "vision_start_token_id": ids["vision_start"],
               "vision_end_token_id": ids["vision_end"]}
    files = {"config": config, "preprocessor_config": PROCESSOR, "tokenizer": tokenizer(SPECIAL),
             "tokenizer_config": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}}
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text((DATA / "templates" / "Qwen3.5-4B.jinja").read_text())


def image(*args) -> dict:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base(*args)}"}}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def server(start, tmp_path_factory):
    directory = tmp_path_factory.mktemp("images")
    write(directory)
    with start(str(directory), "--load-format", "dummy", "--served-model-name", MODEL, "--max-num-seqs", "8",
               "--max-num-batched-tokens", "48", "--limit-mm-per-prompt", '{"image": 3}') as server:
        yield server


def ask(server, *content, salt="", **more):
    extra = {"ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}} | ({"cache_salt": salt} if salt else {})
    return server.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": list(content)}], max_tokens=12,
                                                 temperature=0, logprobs=True, extra_body=extra, **more)


def scores(answer) -> list[float]:
    return [token.logprob for token in answer.choices[0].logprobs.content]


def test_rows_of_images_are_tokens(server):
    words = ask(server, text("What is it?")).usage.prompt_tokens
    # The marks around an image are tokens too.
    for (width, height), rows in {(64, 64): 64, (32, 64): 32, (16, 8): 2, (200, 200): 64}.items():
        answer = ask(server, image(1, width, height), text("What is it?"))
        assert answer.usage.prompt_tokens == words + rows + 2, (width, height)
    two = ask(server, image(1), text("and"), image(2, 16, 16), text("What is it?")).usage.prompt_tokens
    assert two >= words + 64 + 4 + 4


def test_what_an_image_shows_is_seen(server):
    # Noise of one size: only the pixels differ.
    first, again, other = (ask(server, image(seed), text("What is it?")) for seed in (11, 11, 12))
    assert scores(first) == scores(again) and scores(first) != scores(other)
    cached = lambda answer: answer.usage.prompt_tokens_details.cached_tokens
    # What is before an image is shared, its rows with the same image alone.
    assert cached(again) > 64 > cached(other)


def test_text_does_not_depend_on_the_load(server):
    # With a cache of their own both times, images are computed again.
    of = lambda seed, salt: scores(ask(server, image(seed), text(f"Image {seed}?"), salt=salt))
    alone = [of(seed, "alone") for seed in range(20, 26)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda seed: of(seed, "together"), range(20, 26))) == alone


def test_many_large_files_at_once(server):
    # Together more than the memory for bodies, which are held while their images wait to be decoded.
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": [image(5, 1100, 1100), text("What is it?")]}]}
    body = json.dumps(body).encode()
    assert 30 * len(body) > 128 << 20
    send = lambda _: server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"}).status_code
    with ThreadPoolExecutor(30) as pool:
        assert set(pool.map(send, range(30))) == {200}


def test_a_streamed_answer_is_the_same(server):
    whole = ask(server, image(3), text("What is it?")).choices[0].message.content
    pieces = ask(server, image(3), text("What is it?"), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices) == whole


def test_messages_and_responses_take_images(server):
    messages = [{"role": "user", "content": [image(4), text("What is it?")]}]
    tokens = server.http.post("/tokenize", json={"messages": messages}).raise_for_status().json()["count"]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        source = {"type": "base64", "media_type": "image/png", "data": base(4)}
        usage = claude.messages.create(model=MODEL, max_tokens=4, messages=[
            {"role": "user", "content": [{"type": "image", "source": source}, text("What is it?")]}]).usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == tokens
    content = [{"type": "input_image", "image_url": f"data:image/png;base64,{base(4)}"}, {"type": "input_text", "text": "What is it?"}]
    response = server.openai.responses.create(model=MODEL, max_output_tokens=4, input=[{"role": "user", "content": content}])
    assert response.usage.input_tokens == tokens


@pytest.mark.parametrize("url, named", [
    ("data:image/png;base64,AAAA", "not an image"),
    ("data:image/png;base64," + base64.b64encode(png(1, 64, 64)[:900]).decode(), "cannot be decoded"),
    ("https://upload.example/x.png", "--allowed-media-domains"),
    ("file:///etc/passwd", "data URL"),
])
def test_images_that_cannot_be_taken_are_refused(server, url, named):
    with pytest.raises(openai.BadRequestError, match=named):
        ask(server, {"type": "image_url", "image_url": {"url": url}}, text("What is it?"))


def test_more_images_than_allowed_are_refused(server):
    with pytest.raises(openai.BadRequestError, match="3"):
        ask(server, *(image(seed, 8, 8) for seed in range(4)), text("What are they?"))


def test_the_text_of_a_placeholder_is_text(server):
    answer = ask(server, text("What is <|vision_start|><|image_pad|><|vision_end|>?"))
    assert answer.choices[0].message.content


def test_the_encoders_memory_is_reserved(server):
    memory = server.http.get("/memory").raise_for_status().json()
    components = {line["name"]: line["bytes"] for line in memory["profile"]["ready"]["components"]}
    assert components["encoder"] > 0
    model = server.http.get("/v1/models").raise_for_status().json()["data"][0]
    assert model["input_modalities"] == ["text", "image"]


def test_text_alone_reserves_nothing(start, tmp_path):
    write(tmp_path)
    with start(str(tmp_path), "--load-format", "dummy", "--served-model-name", MODEL, "--limit-mm-per-prompt", '{"image": 0}') as server:
        components = server.http.get("/memory").raise_for_status().json()["profile"]["ready"]["components"]
        assert sum(line["bytes"] for line in components if line["name"] == "encoder") == 0
        with pytest.raises(openai.BadRequestError, match="image"):
            ask(server, image(1), text("What is it?"))


def test_a_processor_that_does_not_fit_the_encoder_is_refused(tmp_path):
    write(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | {"temporal_patch_size": 1}))
    ended = subprocess.run([BINARY, "plan", str(tmp_path), "--device", "cpu"], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 3 and "temporal_patch_size" in ended.stderr and "preprocessor_config.json" in ended.stderr, ended.stderr
