"""What scripts/floors.py counts: the bytes that `plimsoll plan` predicts, and products, experts and states as computed by hand."""

import importlib.machinery
import importlib.util
import json
import subprocess
import sys

import pytest

from conftest import BINARY, ROOT
from test_bench import TINY

sys.path.insert(0, str(ROOT / "scripts"))

from dummy_model import LLAMA_3_1_8B, write_model  # noqa: E402
from floors import Floor  # noqa: E402


def script(name):
    """A script without a suffix, as a module."""
    loader = importlib.machinery.SourceFileLoader(name.replace("-", "_"), str(ROOT / "scripts" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


SHAPES = script("bench-h200-shapes")
RATES = {"bytes_per_second": 4e12, "products_per_second": 600e12}


def floor(shape):
    config, flags = SHAPES.SHAPES[shape]
    return Floor(config, RATES, flags)


@pytest.mark.parametrize("shape", SHAPES.SHAPES)
def test_bytes_are_those_of_the_plan(shape, tmp_path):
    config, flags = SHAPES.SHAPES[shape]
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [BINARY, "plan", tmp_path, "--load-format", "dummy", "--device", "cuda", "--device-memory", "300GiB", "--max-model-len", "4096",
               "--json", "--no-profile-cache", "--device-lock-dir", tmp_path, *flags]
    plan = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    if not plan["device"]["assumed"]:
        pytest.skip("the GPU that is here decides how formats are kept")
    least, text = floor(shape), config.get("text_config", config)
    embedding = 0 if text.get("tie_word_embeddings", config.get("tie_word_embeddings")) else 2 * text["vocab_size"] * text["hidden_size"]
    weights = least.weight_bytes + least.experts * least.expert_bytes + least.head_bytes + embedding
    (planned,) = (part["bytes"] for part in plan["ready"]["components"] if part["name"] == "weights")
    # Norms are not counted. Beside four bits, what kernels need to read them fast is kept.
    assert planned * (0.97 if "w4a16" in shape else 0.995) < weights <= planned, weights / planned
    assert least.kv_bytes(1) == plan["kv_bytes_per_token"]
    assert least.state_bytes == (plan["states"] or {"bytes_per_request": 0})["bytes_per_request"]


def test_products_of_a_dense_model():
    llama = floor("llama-3.1-8b")
    layers = 32 * (4096 * (4096 + 1024) * 2 + 3 * 4096 * 14336)
    head = 4096 * 128256
    # Few rows take as long as the weights, many as long as their operations.
    assert llama.step(1, 1) == llama.step(32, 32) == 2 * (layers + head) / 4e12
    assert llama.step(8192, 1) == 2 * (8192 * layers + head) / 600e12
    # Twice as many operations in eight bits, at half the bytes and a scale for each output.
    fp8 = floor("llama-3.1-8b-fp8")
    assert fp8.step(8192, 1) == pytest.approx(2 * (8192 * layers / 2 + head) / 600e12)
    assert fp8.step(1, 1) == pytest.approx((layers + 2 * head) / 4e12, rel=1e-3)
    # Four bits become 16 before they are multiplied.
    int4 = floor("llama-3.1-8b-w4a16")
    assert int4.step(8192, 1) == llama.step(8192, 1)
    assert int4.step(1, 1) == pytest.approx((layers * (0.5 + 2 / 128) + 2 * head) / 4e12)
    assert [floor(shape).kv_bytes(100) for shape in ("llama-3.1-8b", "llama-3.1-8b-kv-fp8")] == [131072 * 100, 65536 * 100]
    assert llama.latency(1, 128, 128) > 127 * llama.step(1, 1)


def test_rows_read_the_experts_that_they_hit():
    mixture = floor("qwen3-30b-a3b")
    # The second row finds each of its eight with one of the first in eight of 128 cases.
    assert mixture.distinct(1) == pytest.approx(8) and mixture.distinct(2) == pytest.approx(8 + 8 * 120 / 128)
    assert 128 - mixture.distinct(1000) < 1e-6
    expert = 3 * 2048 * 768
    dense = 48 * (2048 * 128 * (32 + 2 * 4 + 32) + 128 * 2048) + 2048 * 151936
    assert mixture.step(1, 1) == pytest.approx(2 * (dense + 48 * 8 * expert) / 4e12)
    # Of a prompt every row goes through eight.
    assert mixture.step(65536, 0) == pytest.approx(2 * 65536 * (dense - 2048 * 151936 + 48 * 8 * expert) / 600e12)
    # MXFP4: half a byte and a scale for each 32; 4.25 bits.
    oss = floor("gpt-oss-20b")
    assert oss.expert_bytes == 24 * 3 * 2880 * 2880 * 4.25 / 8
    # Windows of 128 tokens in every second layer.
    assert oss.kv_bytes(1000) == 2 * 8 * 64 * 2 * 12 * (1000 + 128)
    # What Qwen leaves in 16 bits is a small part, and the shared expert is none of it.
    halves, blocks = floor("qwen3.6-35b-a3b"), floor("qwen3.6-35b-a3b-fp8-block")
    floats = 40 * 2048 * (256 + 1) + 30 * 2048 * (32 + 32) + 30 * 8192 * 4
    assert blocks.weight_bytes == pytest.approx((halves.weight_bytes + 2 * floats) / 2, rel=1e-3)
    assert blocks.expert_bytes == pytest.approx(halves.expert_bytes / 2, rel=1e-3)


def test_states_are_read_and_written_once_a_step():
    hybrid = floor("qwen3.5-27b")
    state = 4 * 48 * (48 * 128 * 128 + 3 * 10240)
    assert hybrid.state_bytes == state
    # Sixteen layers have keys and values.
    assert hybrid.decode_attention(1000) == (1000 * 16 * 2 * 4 * 256 * 2 + 2 * state) / 4e12
    assert hybrid.decode(32, 0) - hybrid.step(32, 32) == pytest.approx(32 * 2 * state / 4e12)
    # Of a prompt, a state is written at its end.
    operations = 6 * 48 * 48 * 128 * 128 * 500 + 16 * 4 * 24 * 256 * 500 * 500 / 2
    assert hybrid.prompt_attention(500) == pytest.approx(operations / 600e12 + state / 4e12)


def test_figures_have_floors():
    figures = dict.fromkeys(["batch 1 ms/token", "batch 32 ms/token", "offline req/s", "64 at once req/s", "256 at once req/s", "long prompt s",
                             SHAPES.LONG_DECODE, "start s", "64 at once TTFT ms", "chats: turns/s"], 1.0)
    for name in SHAPES.SHAPES:
        least = SHAPES.floors(figures, floor(name), 500, 65536)
        assert least.keys() == set(list(figures)[:7]) and min(least.values()) > 0, name
        assert least["batch 1 ms/token"] < least["batch 32 ms/token"] and least["64 at once req/s"] <= least["256 at once req/s"], name
    llama = Floor(LLAMA_3_1_8B, RATES)
    least = SHAPES.floors(figures, llama, 500, 65536)
    assert least["offline req/s"] == pytest.approx(1 / llama.request(512, 128, 500))
    # 16 GB of weights, and 64 times 1.1 GB of keys and values.
    assert least[SHAPES.LONG_DECODE] == pytest.approx((15.0e9 + 64 * 8352 * 131072) / 4e12 * 1e3, rel=1e-2)


def test_steps_of_long_contexts_are_timed_without_their_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr(SHAPES, "LONG_BATCH", 4)
    monkeypatch.setattr(SHAPES, "LONG_INPUT", 600)
    monkeypatch.setattr(SHAPES, "LONG_OUTPUT", 100)
    monkeypatch.setenv("PLIMSOLL_DEVICE_LOCK_DIR", str(tmp_path))
    write_model(tmp_path, TINY)
    found = SHAPES.Shape(BINARY, tmp_path, ["--device", "cpu", "--device-memory", "1GiB"], []).long_decode()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["batch_size"] == 4 and report["input_len"] == 600
    (step,) = found.values()
    # Fewer than all steps, none of which computes a prompt: so they are shorter than those of a batch on average.
    assert 0 < step < 1e3 * report["avg_latency"] / 100
