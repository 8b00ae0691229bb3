"""The default model, asked through the official client: what a newcomer sees."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from conftest import SMOLLM2
from test_formats import told

PARIS = [{"role": "user", "content": "What is the capital of France?"}]


def ask(server, messages, **kwargs):
    """A greedy answer, unless told otherwise."""
    kwargs = {"temperature": 0, "max_tokens": 32, **kwargs}
    return server.openai.chat.completions.create(model="smollm2", messages=messages, **kwargs)


def test_paris(smollm2):
    completion = ask(smollm2, PARIS)
    choice = completion.choices[0]
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop", "the model ends its turn"
    assert "<|im_end|>" not in choice.message.content
    assert 0 < completion.usage.completion_tokens < 32


def test_paris_streamed(smollm2):
    whole = ask(smollm2, PARIS)
    *chunks, usage = ask(smollm2, PARIS, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert usage.usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 3, "the text comes piece by piece"


def test_its_weights_keep_their_bits(smollm2):
    model = told(smollm2)
    # Four bits and two floats for 32 of them in Q4_1; the embedding is in Q8_0.
    assert model["quantization"] == "Q4_1, Q8_0" and 5 < model["bits_per_weight"] < 6
    assert model["num_parameters"] == model["num_active_parameters"] == 134_515_008


def test_completion_continues_text(smollm2):
    ask = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    text = smollm2.openai.completions.create(**ask).choices[0].text
    assert text.startswith(" Paris"), "the space before the first word belongs to the text"
    assert smollm2.openai.completions.create(**ask, echo=True).choices[0].text == ask["prompt"] + text


def test_seeds_are_reproducible(smollm2):
    story = [{"role": "user", "content": "Write one sentence about the sea."}]

    def text(**kwargs):
        sampled = ask(smollm2, story, temperature=1.0, max_tokens=24, **kwargs)
        return [choice.message.content for choice in sampled.choices]

    assert text(seed=1) == text(seed=1)
    assert text(seed=1) != text(seed=2)
    assert text(seed=1, n=3) == text(seed=1) + text(seed=2) + text(seed=3)


def test_logprobs_are_probabilities(smollm2):
    completion = ask(smollm2, PARIS, logprobs=True, top_logprobs=5)
    content = completion.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == completion.choices[0].message.content
    for entry in content:
        top = [candidate.logprob for candidate in entry.top_logprobs]
        assert len(top) == 5 and top == sorted(top, reverse=True) and top[0] <= 0
        # Greedy: the token taken is the likeliest.
        assert entry.logprob == top[0] and entry.token == entry.top_logprobs[0].token


def test_stop_string(smollm2):
    text = ask(smollm2, PARIS).choices[0].message.content
    choice = ask(smollm2, PARIS, stop=["Paris"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (text[: text.index("Paris")], "stop")


def test_penalties_and_bias_change_the_text(smollm2):
    count = [{"role": "user", "content": "Repeat the word yes ten times."}]
    plain = ask(smollm2, count).choices[0].message.content
    assert ask(smollm2, count, frequency_penalty=2.0).choices[0].message.content != plain
    paris = smollm2.http.post("/tokenize", json={"prompt": " Paris"}).json()["tokens"]
    assert len(paris) == 1
    assert "Paris" not in ask(smollm2, PARIS, logit_bias={str(paris[0]): -100}).choices[0].message.content


def test_unicode_survives_the_stream(smollm2):
    echo = [{"role": "user", "content": "Say exactly: 你好 🙂 naïve"}]
    whole = ask(smollm2, echo).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(smollm2, echo, stream=True)]
    assert "".join(pieces) == whole
    text = "你好 🙂 naïve ไทย"
    tokens = smollm2.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert smollm2.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == text


def test_a_prompt_that_is_too_long_says_so(smollm2):
    with pytest.raises(openai.BadRequestError) as info:
        ask(smollm2, [{"role": "user", "content": "word " * 3000}])
    assert info.value.code == "context_length_exceeded"


def test_many_chats_with_kv_for_few(start, smollm2):
    topics = "sea moon bread clocks rain wolves maps salt trains fire glass owls rivers chess honey snow".split()
    prompts = [f"Tell me a fact about {topic}." for topic in topics]

    def text(server, prompt):
        return ask(server, [{"role": "user", "content": prompt}], max_tokens=32).choices[0].message.content

    # 40 prompt tokens and 32 of output each: 512 tokens of KV are enough for about seven at once.
    args = ["--served-model-name", "smollm2", "--max-model-len", "512", "--max-total-token-num", "512"]
    with start(str(SMOLLM2), *args, "--max-num-seqs", "16") as small:
        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(lambda prompt: text(small, prompt), prompts))
        assert small.metric("plimsoll_preemptions_total", cause="kv_full") > 0, "KV was meant to be scarce"
        small.wait_until_empty()
    alone = [text(smollm2, prompt) for prompt in prompts]
    assert together == alone
