"""Tiny models with random weights and published chat templates. Each has the vocabulary that belongs to its template, or a token for each byte
and one for each of the template's marks."""

import json
import random
from pathlib import Path
from typing import NamedTuple

from conftest import ROOT

GOLDEN = ROOT / "tests" / "golden"
DATA = ROOT / ".cache" / "test-data" / "llama.cpp"
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string", "enum": ["Ulm", "Aachen"]}}, "required": ["place"],
                   "additionalProperties": False},
}
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]")
HARMONY = ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>")


class TinyModel(NamedTuple):
    # The golden model whose shape it has, and the template.
    golden: str
    template: str
    # The file of the vocabulary, or the marks that follow 256 tokens of bytes.
    vocabulary: str | tuple[str, ...]
    # What ends an answer.
    eos: int | str
    # Tokens of a vocabulary that is a file.
    size: int = 320


TINY_MODELS = {
    "qwen3.5": TinyModel("qwen3_5-vision", "Qwen3.5-4B", "qwen35", 248046, 248320),
    "qwen3.5-moe": TinyModel("qwen3_5-moe", "Qwen3.5-4B", QWEN, "<|im_end|>"),
    "qwen3-moe": TinyModel("qwen3-moe", "Qwen-Qwen3-0.6B", QWEN, "<|im_end|>"),
    # As Qwen3-Coder-Next.
    "qwen3-next": TinyModel("qwen3-next-moe", "Qwen3-Coder", QWEN, "<|im_end|>"),
    "qwen2-moe": TinyModel("qwen2-moe", "Qwen-Qwen2.5-7B-Instruct", QWEN, "<|im_end|>"),
    "mixtral": TinyModel("mixtral", "mistralai-Mistral-Nemo-Instruct-2407", MISTRAL, "</s>"),
    "gpt-oss": TinyModel("gpt-oss-mxfp4", "openai-gpt-oss-120b", HARMONY, "<|return|>"),
    "gemma4-moe": TinyModel("gemma4-moe", "google-gemma-4-31B-it", "gemma-4", 106, 262144),
}


def tokenizer(special: tuple[str, ...] | list[str]) -> dict:
    """Byte-level BPE without merges, as GPT-2 writes bytes: those that are no printable characters follow the others."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    added = [{"id": 256 + index, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for index, name in enumerate(special)]
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": bytes_alone, "post_processor": None, "decoder": bytes_alone,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "vocab": {names[byte]: byte for byte in range(256)}, "merges": []}}


def golden_config(name: str) -> dict:
    return json.loads((GOLDEN / name / "config.json").read_text())


def write(directory: Path, name: str) -> list[str]:
    """The files of TINY_MODELS[name] but for its weights, and the arguments that serve it under this name."""
    of = TINY_MODELS[name]
    template = DATA / "templates" / f"{of.template}.jinja"
    arguments, eos = [str(directory), "--load-format", "dummy", "--served-model-name", name], of.eos
    if isinstance(of.vocabulary, str):
        arguments += ["--tokenizer", str(DATA / "vocab" / f"{of.vocabulary}.gguf"), "--chat-template", str(template)]
    else:
        eos = 256 + of.vocabulary.index(of.eos)
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer(of.vocabulary)))
        (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": of.vocabulary[0], "eos_token": of.eos}))
        (directory / "chat_template.jinja").write_text(template.read_text())
    config = golden_config(of.golden)
    config.get("text_config", config).update(vocab_size=of.size, max_position_embeddings=16384, bos_token_id=None, eos_token_id=eos)
    (directory / "config.json").write_text(json.dumps(config))
    return arguments


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(["harbour", "keel", "mast", "rope", "tide", "anchor", "hull", "sail"]) for _ in range(count))
