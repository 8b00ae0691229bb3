"""A tiny Mixtral whose routers send tokens where a test wants them."""

import array
import json
import math
import random
import struct
import sys

from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from dummy_model import write_model  # noqa: E402

HIDDEN, INNER, HEAD, LAYERS = 64, 32, 64, 3
EXPERTS, TOP_K = 8, 2
VOCABULARY = 160
CONFIG = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HEAD, "hidden_act": "silu",
    "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "max_position_embeddings": 1024, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "float32",
    "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2,
}


def write(directory, spread: bool) -> None:
    """`spread`: token t goes to the experts t and t + 1 modulo EXPERTS, in every layer. Otherwise every token goes to the first
    TOP_K, and the weights of all others are not numbers: an answer in numbers shows that none of them was read."""
    rng = random.Random(7)
    write_model(directory, CONFIG)
    tensors = {}

    def put(name: str, rows: int, columns: int, value) -> None:
        tensors[name] = ([rows, columns], [value(row, column) for row in range(rows) for column in range(columns)])

    def noise(columns: int):
        return lambda *_: rng.gauss(0, 1 / math.sqrt(columns))

    def embedding(token: int, column: int) -> float:
        # No layer adds to the first columns, which the routers read.
        if column >= EXPERTS:
            return rng.gauss(0, 0.5)
        if not spread:
            return 4.0 if column == 0 else 0.0
        return {0: 4.0, 1: 2.0}.get((column - token) % EXPERTS, 0.0)

    def router(expert: int, column: int) -> float:
        if spread:
            return 1.0 if column == expert else 0.0
        return float(EXPERTS - expert) if column == 0 else 0.0

    put("model.embed_tokens.weight", VOCABULARY, HIDDEN, embedding)
    put("lm_head.weight", VOCABULARY, HIDDEN, noise(HIDDEN))
    norms = ["model.norm"]
    for layer in range(LAYERS):
        scope = f"model.layers.{layer}"
        norms += [f"{scope}.input_layernorm", f"{scope}.post_attention_layernorm"]
        for part, heads in [("q", 2), ("k", 1), ("v", 1)]:
            put(f"{scope}.self_attn.{part}_proj.weight", heads * HEAD, HIDDEN, noise(HIDDEN))
        out = noise(2 * HEAD)
        put(f"{scope}.self_attn.o_proj.weight", HIDDEN, 2 * HEAD, lambda row, _, out=out: out() if row >= EXPERTS else 0.0)
        put(f"{scope}.block_sparse_moe.gate.weight", EXPERTS, HIDDEN, router)
        for expert in range(EXPERTS):
            name = f"{scope}.block_sparse_moe.experts.{expert}"
            is_read = spread or expert < TOP_K
            into, out = noise(HIDDEN), noise(INNER)
            for part in ("w1", "w3"):
                put(f"{name}.{part}.weight", INNER, HIDDEN, into if is_read else lambda *_: math.nan)
            put(f"{name}.w2.weight", HIDDEN, INNER,
                (lambda row, _, out=out: out() if row >= EXPERTS else 0.0) if is_read else lambda *_: math.nan)
    for norm in norms:
        tensors[f"{norm}.weight"] = ([HIDDEN], [1.0] * HIDDEN)

    header, data = {}, array.array("f")
    for name, (shape, values) in tensors.items():
        begin = 4 * len(data)
        data.extend(values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, 4 * len(data)]}
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data.tobytes())
