"""Fill in the middle: a tiny model whose tokenizer has the tokens for it, by the official client."""

import json

import openai
import pytest

from conftest import ROOT
from test_download import tokenizer

GOLDEN = ROOT / "tests/golden/qwen2"
NAMES = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]


@pytest.fixture(scope="module")
def coder(start, tmp_path_factory):
    directory = tmp_path_factory.mktemp("coder")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (directory / name).write_bytes((GOLDEN / name).read_bytes())
    spec = tokenizer()
    first = len(spec["model"]["vocab"])
    # As in Qwen's tokenizers, they are no special tokens.
    like = spec["added_tokens"][0] | {"special": False}
    spec["added_tokens"] += [like | {"id": first + i, "content": name} for i, name in enumerate(NAMES)]
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    with start(str(directory), "--served-model-name", "coder", "--max-model-len", "128", "--max-num-seqs", "4") as server:
        server.ids = dict(zip(NAMES, range(first, first + len(NAMES))))
        yield server


def tokens(server, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    return server.http.post("/tokenize", json=body).raise_for_status().json()["tokens"]


def complete(server, **body):
    body = {"prompt": "def f(a):", "suffix": "return a", "max_tokens": 3, "temperature": 0} | body
    extra = {"return_token_ids": True}
    return server.openai.completions.create(model="coder", extra_body=extra | body.pop("extra_body", {}), **body)


def test_prefix_suffix_and_middle(coder):
    prefix, middle, suffix = (coder.ids[name] for name in NAMES)
    expected = [prefix, *tokens(coder, "def f(a):"), suffix, *tokens(coder, "return a"), middle]
    completion = complete(coder)
    [choice] = completion.choices
    assert choice.prompt_token_ids == expected and completion.usage.prompt_tokens == len(expected)
    # The same tokens as a prompt give the same text.
    same = coder.openai.completions.create(model="coder", prompt=expected, max_tokens=3, temperature=0)
    assert choice.text == same.choices[0].text
    two = complete(coder, prompt=["a", "b"])
    assert [choice.prompt_token_ids[1] for choice in two.choices] == [tokens(coder, "a")[0], tokens(coder, "b")[0]]
    chunks = list(complete(coder, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert complete(coder, suffix="").choices[0].prompt_token_ids == tokens(coder, "def f(a):")


def test_the_tokens_of_the_format_end_the_middle(coder):
    end = coder.ids["<|fim_suffix|>"]
    only = {"logit_bias": {str(end): 100}, "ignore_eos": False}
    [choice] = complete(coder, extra_body=only).choices
    assert (choice.text, choice.finish_reason, choice.token_ids) == ("", "stop", [end])
    # Elsewhere it is a token like others.
    [choice] = complete(coder, suffix=None, extra_body=only).choices
    assert choice.token_ids == [end] * 3 and choice.finish_reason == "length"


@pytest.mark.parametrize(("field", "body"), [
    ("echo", {"echo": True}),
    ("truncate_prompt_tokens", {"extra_body": {"truncate_prompt_tokens": 4}}),
    ("prompt", {"suffix": "x" * 1000}),
])
def test_refusals(coder, field, body):
    with pytest.raises(openai.BadRequestError) as info:
        complete(coder, **body)
    assert info.value.param == field
