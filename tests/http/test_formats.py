"""What a server says of the weights that it serves: how many there are, and in which format."""

import json
import re
import struct
from math import prod

import pytest

from tiny_models import GOLDEN, golden_config, tokenizer


def told(server) -> dict:
    """What /v1/models says, which is what /memory says."""
    model = server.http.get("/v1/models").raise_for_status().json()["data"][0]
    profile = server.http.get("/memory").raise_for_status().json()["profile"]
    assert [profile[field] for field in ("quantization", "bits_per_weight")] == [model[field] for field in ("quantization", "bits_per_weight")]
    held = {part["name"]: part["bytes"] for part in profile["baseline"]["components"]}["weights"]
    assert model["bits_per_weight"] == pytest.approx(8 * held / model["num_parameters"], abs=0.006)
    return model


def tensors(name: str) -> dict[str, int]:
    """The tensors of a golden model, and how many elements they have."""
    with (GOLDEN / name / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {tensor: prod(facts["shape"]) for tensor, facts in header.items() if tensor != "__metadata__"}


def weights(name: str, experts: int | None = None) -> int:
    """How many weights a golden model stores, where only the first `experts` of each layer count. Integers of four bits are packed in words
    of eight; scales and zero points are no weights."""
    count = 0
    for tensor, elements in tensors(name).items():
        expert = re.search(r"\.experts\.(\d+)\.", tensor)
        if tensor.endswith(("weight", "bias")) and (experts is None or expert is None or int(expert[1]) < experts):
            count += elements * (8 if tensor.endswith(".qweight") else 1)
    return count


@pytest.fixture
def serve(start, tmp_path):
    """Serves a golden model."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer([])))
    limits = ["--max-num-seqs", "2", "--max-num-batched-tokens", "64"]
    return lambda name: start(str(GOLDEN / name), "--tokenizer", str(tmp_path), "--served-model-name", "tiny", *limits)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("qwen2", None), ("qwen3-awq", "int4-group-128"), ("qwen3-moe", None), ("qwen3-moe-awq", "int4-group-32"), ("qwen3-moe-fp8-block", "fp8-block")],
)
def test_goldens(serve, name, quantization):
    with serve(name) as server:
        model = told(server)
    assert model["quantization"] == quantization
    assert model["num_parameters"] == weights(name)
    assert model["num_active_parameters"] == weights(name, golden_config(name).get("num_experts_per_tok"))
    assert ("moe" in name) == (model["num_active_parameters"] < model["num_parameters"])


def test_an_encoder_that_is_not_loaded_is_told(serve):
    # Its tokenizer has no token for an image: text alone is served.
    name = "qwen3_5-vision"
    encoder = sorted(tensor for tensor in tensors(name) if tensor.startswith("model.visual."))
    with serve(name) as server:
        log = server.log.read_text()
        model = told(server)
    assert f"{len(encoder)} tensors outside the decoder are not loaded, such as {encoder[0]}\n" in log, log
    assert "Qwen3_5ForConditionalGeneration: only its text part is served, weights for images are not loaded\n" in log
    assert model["input_modalities"] == ["text"]
    assert model["num_parameters"] == sum(elements for tensor, elements in tensors(name).items() if tensor not in encoder)
