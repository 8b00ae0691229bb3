"""Completions, log-probabilities of prompts, and vLLM's further parameters."""

import math

import openai
import pytest

TEXT = "The capital of France is Paris, and the capital of Germany is Berlin."


def complete(server, **body):
    """A completion of the only model."""
    return server.openai.completions.create(model=server.openai.models.list().data[0].id, **{"temperature": 0, **body})


def refused(server, param: str, **body) -> str:
    """The message of a 400 that names `param`."""
    with pytest.raises(openai.BadRequestError) as info:
        complete(server, **body)
    assert info.value.param == param, info.value
    return info.value.message


def tokens_of(server, text: str) -> list:
    return server.http.post("/tokenize", json={"prompt": text}).raise_for_status().json()["tokens"]


# --- echo and logprobs, as evaluation harnesses ask for them


def scores(server, tokens: list, **body):
    """(token_logprobs, top_logprobs) of the prompt, nothing generated."""
    choice = complete(server, prompt=tokens, echo=True, logprobs=1, max_tokens=0, **body).choices[0]
    assert choice.finish_reason == "length"
    assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens) == len(tokens)
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
    return choice.logprobs.token_logprobs, choice.logprobs.top_logprobs


def test_a_continuation_is_as_likely_however_it_is_asked_for(smollm2):
    """What lm-evaluation-harness does: the sum over the continuation's tokens, for two splits and one token at a time."""
    tokens = tokens_of(smollm2, TEXT)
    whole, _ = scores(smollm2, tokens)
    assert all(logprob <= 0 for logprob in whole[1:])
    for split in [3, 9]:
        context, continuation = tokens[:split], tokens[split:]
        echoed, _ = scores(smollm2, context + continuation)
        assert sum(echoed[split:]) == pytest.approx(sum(whole[split:]), abs=1e-4)
    # Each token by itself, as the likeliest at its place or not, and the harness's way of asking: one token, thrown away.
    for at in [4, len(tokens) - 2]:
        choice = complete(smollm2, prompt=tokens[:at], max_tokens=1, logprobs=5, echo=True).choices[0].logprobs
        assert len(choice.tokens) == at + 1
        assert choice.token_logprobs[1:at] == pytest.approx(whole[1:at], abs=1e-4)
        name = complete(smollm2, prompt=tokens[: at + 1], max_tokens=0, logprobs=1, echo=True).choices[0].logprobs.tokens[at]
        if name in choice.top_logprobs[at]:
            assert choice.top_logprobs[at][name] == pytest.approx(whole[at], abs=1e-4)


def test_a_greedy_continuation_is_recognized(smollm2):
    """lm-evaluation-harness compares the token's number with the largest of the likeliest: they are equal to the bit."""
    context = tokens_of(smollm2, "The capital of France is")
    generated = complete(
        smollm2, prompt=context, max_tokens=6, logprobs=1, extra_body={"return_token_ids": True, "ignore_eos": True}
    ).choices[0]
    said, top = scores(smollm2, context + generated.token_ids)
    for own, likeliest in zip(said[len(context) :], top[len(context) :], strict=True):
        assert own == max(likeliest.values())
    assert said[len(context) :] == pytest.approx(generated.logprobs.token_logprobs, abs=1e-3)
    for own, likeliest in zip(generated.logprobs.token_logprobs, generated.logprobs.top_logprobs, strict=True):
        assert own == max(likeliest.values())


def test_a_cached_prompt_is_scored_all_the_same(smollm2):
    tokens = tokens_of(smollm2, TEXT * 4)
    first, _ = scores(smollm2, tokens)
    usage = complete(smollm2, prompt=tokens, max_tokens=1).usage
    assert usage.prompt_tokens_details.cached_tokens > 0, "scoring fills the cache"
    assert scores(smollm2, tokens)[0] == first
    # Prompts beside each other.
    choices = complete(smollm2, prompt=[tokens, tokens[:20]], echo=True, logprobs=0, max_tokens=0).choices
    assert [len(choice.logprobs.tokens) for choice in choices] == [len(tokens), 20]
    assert choices[1].logprobs.token_logprobs[1:] == pytest.approx(first[1:20], abs=1e-4)


def test_echo_is_text_tokens_and_offsets(sim):
    completion = complete(sim, prompt="Hello", max_tokens=4, echo=True, logprobs=2, extra_body={"ignore_eos": True})
    choice = completion.choices[0]
    assert choice.text.startswith("Hello") and len(choice.text) == 9
    assert choice.logprobs.tokens[:5] == list("Hello") and len(choice.logprobs.tokens) == 9
    assert choice.logprobs.text_offset == list(range(9))
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (5, 4)
    only = complete(sim, prompt="Hello", max_tokens=0, echo=True).choices[0]
    assert (only.text, only.logprobs, only.finish_reason) == ("Hello", None, "length")
    assert "max_tokens" in refused(sim, "max_tokens", prompt="Hello", max_tokens=0)


def test_echo_streams_its_prompt_first(sim):
    body = {"prompt": "Hello", "max_tokens": 4, "echo": True, "logprobs": 1, "seed": 1}
    whole = complete(sim, **body).choices[0]
    chunks = list(complete(sim, **body, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    lists = [chunk.choices[0].logprobs for chunk in chunks]
    for name in ["tokens", "token_logprobs", "text_offset"]:
        assert sum((getattr(part, name) for part in lists), []) == getattr(whole.logprobs, name)


# --- prompt_logprobs


def test_prompt_logprobs_have_vllms_shape(smollm2):
    tokens = tokens_of(smollm2, TEXT)
    choice = complete(smollm2, prompt=tokens, max_tokens=1, extra_body={"prompt_logprobs": 2}).choices[0]
    assert len(choice.prompt_logprobs) == len(tokens)
    assert choice.prompt_logprobs[0] is None
    expected, _ = scores(smollm2, tokens)
    for token, entry, logprob in zip(tokens[1:], choice.prompt_logprobs[1:], expected[1:], strict=True):
        assert next(iter(entry)) == str(token), "the prompt's own token first"
        own = entry[str(token)]
        assert set(own) == {"logprob", "rank", "decoded_token"}
        assert own["logprob"] == logprob
        assert len(entry) == (2 if own["rank"] <= 2 else 3)
        ranked = sorted(entry.values(), key=lambda one: one["rank"])
        assert [one["rank"] for one in ranked[:2]] == [1, 2]
        assert ranked[0]["logprob"] >= ranked[1]["logprob"]
        assert sum(math.exp(one["logprob"]) for one in ranked) <= 1.001


def test_prompt_logprobs_of_chat(sim):
    messages = [{"role": "user", "content": "Hello"}]
    body = {"prompt_logprobs": 1, "return_token_ids": True}
    answer = sim.openai.chat.completions.create(model="sim", messages=messages, max_tokens=3, extra_body=body)
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    assert answer.prompt_logprobs[0] is None
    ids = [next(iter(entry)) for entry in answer.prompt_logprobs[1:]]
    assert ids == [str(token) for token in answer.prompt_token_ids[1:]]
    assert len(answer.choices[0].token_ids) == answer.usage.completion_tokens


def test_prompt_logprobs_are_refused_where_they_cannot_be(sim):
    assert "20" in refused(sim, "prompt_logprobs", prompt="a", extra_body={"prompt_logprobs": 21})
    assert "stream" in refused(sim, "prompt_logprobs", prompt="a", stream=True, extra_body={"prompt_logprobs": 1})
    assert "20" in refused(sim, "logprobs", prompt="a", logprobs=21)
    refused(sim, "prompt_logprobs", prompt="a", extra_body={"prompt_logprobs": -1})


# --- what else completions have


def test_best_of_returns_the_likeliest(sim, smollm2):
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 1.5, "seed": 3, "logprobs": 0}
    mean = lambda choice: sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)  # noqa: E731
    all_five = complete(smollm2, **body, n=5)
    best_two = complete(smollm2, **body, n=2, best_of=5)
    expected = sorted(all_five.choices, key=mean, reverse=True)[:2]
    assert [choice.text for choice in best_two.choices] == [choice.text for choice in expected]
    assert [choice.index for choice in best_two.choices] == [0, 1]
    assert best_two.usage == all_five.usage, "what was generated is counted"
    assert complete(sim, prompt="a", max_tokens=2, best_of=3).choices[0].logprobs is None
    refused(sim, "best_of", prompt="a", n=3, best_of=2)
    assert "stream" in refused(sim, "best_of", prompt="a", best_of=2, stream=True)
    assert list(complete(sim, prompt="a", best_of=2, n=2, max_tokens=2, stream=True))


def test_suffix_is_refused_and_says_why(sim):
    assert "fill-in-the-middle" in refused(sim, "suffix", prompt="a", suffix="b")
    assert complete(sim, prompt="a", suffix="", max_tokens=1).choices


def test_tokens_by_their_ids(sim):
    body = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = complete(sim, prompt="Hi", max_tokens=3, logprobs=1, extra_body=body).choices[0]
    assert choice.prompt_token_ids == [72, 105]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids[: len(choice.logprobs.tokens)]]
    assert all(name.startswith("token_id:") for top in choice.logprobs.top_logprobs for name in top)
    chunks = list(complete(sim, prompt="Hi", max_tokens=3, stream=True, extra_body=body))
    assert chunks[0].choices[0].prompt_token_ids == [72, 105]
    streamed = sum((chunk.choices[0].token_ids for chunk in chunks), [])
    assert streamed == choice.token_ids


def test_special_tokens_of_a_prompt(smollm2):
    text = "<|im_start|>"
    with_special = complete(smollm2, prompt=text, max_tokens=1, extra_body={"add_special_tokens": True}).usage
    without = complete(smollm2, prompt=text, max_tokens=1, extra_body={"add_special_tokens": False}).usage
    assert with_special.prompt_tokens >= without.prompt_tokens == 1


def test_usage_with_every_chunk(sim):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(sim, prompt="Hello", max_tokens=5, stream=True, stream_options=options))
    *parts, last = chunks
    counts = [chunk.usage.completion_tokens for chunk in parts]
    assert counts == sorted(counts) and counts[-1] == last.usage.completion_tokens
    assert all(chunk.usage.prompt_tokens == 5 for chunk in chunks)
    assert last.choices == []


# --- vLLM's further parameters


def test_min_tokens_hold_back_the_end(sim, smollm2):
    stops = list(b"etaoinsrhdlu ")
    body = {"stop_token_ids": stops, "min_tokens": 4, "return_token_ids": True}
    said = complete(sim, prompt="a", max_tokens=9, extra_body=body).choices[0].token_ids
    assert len(said) >= 5 and not set(said[:4]) & set(stops)
    prompt = "Once upon a time"
    free = complete(smollm2, prompt=prompt, max_tokens=12, stop="e").usage
    held = complete(smollm2, prompt=prompt, max_tokens=12, stop="e", extra_body={"min_tokens": 6}).usage
    assert free.completion_tokens < 6 <= held.completion_tokens
    assert "the answer has at most 2 tokens" in refused(sim, "min_tokens", prompt="a", max_tokens=2, extra_body={"min_tokens": 3})


def test_only_allowed_tokens_are_generated(smollm2):
    digits = [tokens_of(smollm2, digit)[-1] for digit in "0123456789"]
    answer = complete(smollm2, prompt="One plus one is", max_tokens=5, extra_body={"allowed_token_ids": digits})
    assert answer.choices[0].text.isdigit() and len(answer.choices[0].text) == 5
    refused(smollm2, "allowed_token_ids", prompt="a", extra_body={"allowed_token_ids": []})
    refused(smollm2, "allowed_token_ids", prompt="a", extra_body={"allowed_token_ids": [10**6]})


def test_bad_words_are_not_said(smollm2):
    prompt = "The capital of France is"
    said = complete(smollm2, prompt=prompt, max_tokens=3).choices[0].text
    word = said.split()[0].strip(".,")
    other = complete(smollm2, prompt=prompt, max_tokens=12, extra_body={"bad_words": [word]}).choices[0].text
    assert word in said and word not in other.split()
    refused(smollm2, "bad_words", prompt="a", extra_body={"bad_words": [""]})


def test_stop_strings_and_special_tokens_may_stay(sim, smollm2):
    text = complete(sim, prompt="Hello", max_tokens=30, extra_body={"ignore_eos": True}).choices[0].text
    stop = text[4:6]
    cut = complete(sim, prompt="Hello", max_tokens=30, stop=stop, extra_body={"ignore_eos": True}).choices[0].text
    body = {"ignore_eos": True, "include_stop_str_in_output": True}
    kept = complete(sim, prompt="Hello", max_tokens=30, stop=stop, extra_body=body).choices[0].text
    assert (cut, kept) == (text[: text.index(stop)], text[: text.index(stop) + 2])
    # The token that ends a turn.
    messages = [{"role": "user", "content": "Say hi."}]
    body = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    chat = smollm2.openai.chat.completions.create
    answer = chat(model="smollm2", messages=messages, temperature=0, max_tokens=60, extra_body=body)
    if answer.choices[0].finish_reason == "stop":
        assert answer.choices[0].message.content.endswith("<|im_end|>")


def test_prompts_are_truncated_from_the_left(sim):
    body = {"truncate_prompt_tokens": 3, "return_token_ids": True}
    answer = complete(sim, prompt="Hello", max_tokens=2, echo=True, extra_body=body)
    assert answer.choices[0].prompt_token_ids == list(b"llo")
    assert answer.choices[0].text.startswith("llo") and answer.usage.prompt_tokens == 3
    fits = complete(sim, prompt="x" * 5000, max_tokens=6, extra_body={"truncate_prompt_tokens": -1})
    assert fits.usage.prompt_tokens == 4096 - 6
    for wrong in [0, -2, 5000]:
        refused(sim, "truncate_prompt_tokens", prompt="a", extra_body={"truncate_prompt_tokens": wrong})


def test_the_cache_is_shared_with_the_same_salt_alone(sim):
    prompt = "A prompt that fills more than one block of the cache, by far."

    def cached(**extra):
        usage = complete(sim, prompt=prompt, max_tokens=1, extra_body=extra).usage
        return usage.prompt_tokens_details.cached_tokens

    assert (cached(cache_salt="ours"), cached(cache_salt="theirs")) == (0, 0)
    assert cached(cache_salt="ours") > 0
    refused(sim, "cache_salt", prompt="a", extra_body={"cache_salt": ""})
