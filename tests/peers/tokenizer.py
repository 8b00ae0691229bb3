"""The tokenizer of a GGUF file by Hugging Face's `tokenizers`, with the methods of transformers' tokenizers that vLLM's tests call."""

import importlib.machinery
import importlib.util
import struct
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

ROOT = Path(__file__).resolve().parents[2]
# GGUF's types of values; 8 is a string, 9 a list.
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
CONTROL = 3
SIM_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def _jinja():
    """The environment of scripts/render-templates."""
    loader = importlib.machinery.SourceFileLoader("render_templates", str(ROOT / "scripts/render-templates"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("render_templates", loader))
    loader.exec_module(module)
    return module.environment()


def metadata(path):
    """The metadata of a GGUF file of version 3."""
    with open(path, "rb") as file:

        def number(code):
            return struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))[0]

        def value(kind):
            if kind == 8:
                return file.read(number("Q")).decode()
            if kind == 9:
                inner, count = number("I"), number("Q")
                return [value(inner) for _ in range(count)]
            return number(NUMBERS[kind])

        assert file.read(4) == b"GGUF" and number("I") == 3
        _tensors, count = number("Q"), number("Q")
        return {value(8): value(number("I")) for _ in range(count)}


class Encoding(dict):
    @property
    def input_ids(self):
        return self["input_ids"]


class Tokenizer:
    """What is common to the two; `encode` and `decode` are theirs."""

    vocabulary: list[str]

    @staticmethod
    def jinja(template):
        return _jinja().from_string(template)

    def __call__(self, text, add_special_tokens=True, **_):
        one = isinstance(text, str)
        ids = [self.encode(each, add_special_tokens) for each in ([text] if one else text)]
        return Encoding(input_ids=ids[0] if one else ids)

    def convert_ids_to_tokens(self, ids):
        return self.vocabulary[ids] if isinstance(ids, int) else [self.vocabulary[each] for each in ids]

    def convert_tokens_to_ids(self, tokens):
        return self.vocabulary.index(tokens) if isinstance(tokens, str) else [self.vocabulary.index(each) for each in tokens]

    def add_tokens(self, tokens, special_tokens=False):
        """Adapters may have tokens of their own; here are no adapters."""
        return len(tokens)

    def save_pretrained(self, directory):
        pass

    def get_vocab(self):
        return {token: index for index, token in enumerate(self.vocabulary)}

    def apply_chat_template(self, conversation, *, tokenize=True, add_generation_prompt=False, continue_final_message=False, tools=None, **kwargs):
        text = self.template.render(messages=conversation, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)
        if continue_final_message:
            final = conversation[-1]["content"].strip()
            text = text[: text.rindex(final) + len(final)]
        return self.encode(text, add_special_tokens=False) if tokenize else text


class Gguf(Tokenizer):
    """That of a GGUF file, by `tokenizers`."""

    def __init__(self, path):
        fields = metadata(path)
        assert fields["tokenizer.ggml.pre"] == "smollm" and not fields.get("tokenizer.ggml.add_bos_token")
        self.vocabulary = fields["tokenizer.ggml.tokens"]
        self.vocab_size = len(self.vocabulary)
        self.eos_token_id = fields["tokenizer.ggml.eos_token_id"]
        self.template = self.jinja(fields["tokenizer.chat_template"])
        ids = {token: index for index, token in enumerate(self.vocabulary)}
        merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
        self.inner = tokenizers.Tokenizer(models.BPE(ids, merges))
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        self.inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])
        self.inner.decoder = decoders.ByteLevel()
        special = [token for token, kind in zip(self.vocabulary, fields["tokenizer.ggml.token_type"]) if kind == CONTROL]
        self.inner.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])

    def encode(self, text, add_special_tokens=True):
        return self.inner.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids, skip_special_tokens=False):
        return self.inner.decode([ids] if isinstance(ids, int) else ids, skip_special_tokens=skip_special_tokens)


class Bytes(Tokenizer):
    """That of the simulated model: a token is a byte, and 256 ends a text."""

    def __init__(self):
        self.vocabulary = [chr(byte) for byte in range(256)] + ["<|end|>"]
        self.vocab_size, self.eos_token_id = 257, 256
        self.template = self.jinja(SIM_TEMPLATE)

    def encode(self, text, add_special_tokens=True):
        return list(text.encode())

    def decode(self, ids, skip_special_tokens=False):
        ids = [ids] if isinstance(ids, int) else ids
        return bytes(each for each in ids if each < 256).decode(errors="replace")
