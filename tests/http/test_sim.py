"""Everything about the API that needs no weights, against a simulated model with a byte tokenizer."""

import contextlib
import json
import math
import re
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import openai
import pytest
from conftest import BINARY, PATIENCE

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def error(response: httpx.Response, status: int) -> dict:
    """The error object of a response, whose shape is checked."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


def events(server, path: str, body: dict) -> list:
    """The data of a raw event stream, parsed; the last is [DONE]."""
    with server.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        lines = [line for line in response.iter_lines() if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# --- what the server says about itself


def test_models(sim):
    models = sim.openai.models.list().data
    assert [model.id for model in models] == ["sim", "simulated"]
    assert sim.openai.models.retrieve("simulated").object == "model"
    assert models[0].max_model_len == 4096
    with pytest.raises(openai.NotFoundError) as info:
        sim.openai.models.retrieve("gpt-4o")
    assert info.value.code == "model_not_found"


def test_health_ready_version(sim):
    assert sim.http.get("/health").json()["status"] == "ok"
    assert sim.http.get("/ready").json()["status"] == "ready"
    assert sim.http.get("/version").json()["version"].count(".") == 2


def test_memory_adds_up(sim):
    memory = sim.http.get("/memory").raise_for_status().json()
    assert memory["profile"], "the profile's report"
    now = memory["now"]
    assert sum(now["components"].values()) == now["reserved"]
    assert now["components"]["kv"] > 0
    assert memory["device_allocs_after_ready"] == 0


def test_metrics(sim):
    before = sim.metric("plimsoll_generation_tokens_total")
    usage = sim.openai.chat.completions.create(model="sim", messages=HELLO, max_tokens=7).usage
    assert sim.metric("plimsoll_generation_tokens_total") == before + usage.completion_tokens
    for name in ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"]:
        assert sim.metric(name) == 0
    assert sim.metric("vllm:generation_tokens_total") == sim.metric("plimsoll_generation_tokens_total")
    assert sim.metric("vllm:time_to_first_token_seconds_count") >= 1
    assert sim.metric("vllm:iteration_tokens_total_count") == sim.metric("plimsoll_steps_total")
    assert sim.metric("vllm:cache_config_info", block_size="16") == 1
    assert sim.metric("plimsoll_device_memory_bytes", component="kv") > 0


def test_tokenize(sim):
    body = sim.http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert body["tokens"] == list("héllo".encode())
    assert body["count"] == 6 and body["max_model_len"] == 4096
    assert body["token_strs"][0] == "h"
    assert sim.http.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "héllo"}
    chat = sim.http.post("/tokenize", json={"messages": HELLO}).json()
    completion = sim.openai.chat.completions.create(model="sim", messages=HELLO, max_tokens=1)
    assert chat["count"] == completion.usage.prompt_tokens
    assert error(sim.http.post("/detokenize", json={"tokens": [300]}), 400)["param"] == "tokens"


def test_request_id_is_echoed(sim):
    assert sim.http.get("/version", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    assert len(sim.http.get("/version").headers["x-request-id"]) >= 32


# --- chat


def test_chat_streamed_is_the_same_text(sim):
    ask = {"model": "sim", "messages": HELLO, "max_tokens": 100, "seed": 5, "ignore_eos": True}
    whole = sim.openai.chat.completions.create(**extra(ask))
    assert whole.object == "chat.completion" and whole.id.startswith("chatcmpl-")
    choice = whole.choices[0]
    assert choice.finish_reason == "length" and choice.message.role == "assistant"
    assert whole.usage.completion_tokens == 100
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 100
    chunks = list(sim.openai.chat.completions.create(**extra(ask), stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert len({chunk.id for chunk in chunks}) == 1


def extra(ask: dict) -> dict:
    """Moves the fields that the client does not know into extra_body."""
    known = {key: value for key, value in ask.items() if key != "ignore_eos"}
    return {**known, "extra_body": {"ignore_eos": ask.get("ignore_eos", False)}}


def test_chat_chunks_have_openais_shape(sim):
    chunks = events(sim, CHAT, {"messages": HELLO, "max_tokens": 5, "ignore_eos": True})
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)
    first, *middle, last = (chunk["choices"][0] for chunk in chunks)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert all(list(choice["delta"]) == ["content"] and choice["finish_reason"] is None for choice in middle)
    assert last["delta"] == {} and last["finish_reason"] == "length"


def test_usage_comes_last_and_only_if_asked_for(sim):
    body = {"messages": HELLO, "max_tokens": 5, "ignore_eos": True, "stream_options": {"include_usage": True}}
    *chunks, usage = events(sim, CHAT, body)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 5
    response = sim.http.post(CHAT, json={"messages": HELLO, "stream_options": {"include_usage": True}})
    assert error(response, 400)["param"] == "stream_options"


def test_prefix_cache_shows_in_usage(sim):
    long = [{"role": "user", "content": "All work and no play makes Jack a dull boy. " * 10}]
    for _ in range(2):
        usage = sim.openai.chat.completions.create(model="sim", messages=long, max_tokens=1).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_seeds(sim):
    def text(seed, **kwargs):
        ask = {"model": "sim", "messages": HELLO, "max_tokens": 40, "seed": seed, "ignore_eos": True, **kwargs}
        return [choice.message.content for choice in sim.openai.chat.completions.create(**extra(ask)).choices]

    assert text(1) == text(1) != text(2)
    # The choices of one request are those of consecutive seeds.
    assert text(1, n=3) == text(1) + text(2) + text(3)
    assert text(1, temperature=0) == text(2, temperature=0)
    assert text(None) != text(None)


def test_n_streamed(sim):
    body = {"messages": HELLO, "max_tokens": 20, "seed": 3, "n": 4, "ignore_eos": True}
    whole = sim.http.post(CHAT, json=body).json()
    texts = [""] * 4
    for chunk in events(sim, CHAT, {**body, "stream_options": {"include_usage": True}}):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["completion_tokens"] == 80
    assert chunk["usage"]["completion_tokens"] == 80
    # The prompt counts once, however many choices continue it.
    assert whole["usage"]["prompt_tokens"] == sim.http.post("/tokenize", json={"messages": HELLO}).json()["count"]


def test_stop_strings(sim):
    body = {"messages": HELLO, "max_tokens": 200, "seed": 11, "ignore_eos": True}
    text = sim.http.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    stop = text[30:34]
    before = text[: text.index(stop)]
    for form in [stop, ["never found", stop]]:
        choice = sim.http.post(CHAT, json={**body, "stop": form}).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (before, "stop")
        chunks = events(sim, CHAT, {**body, "stop": form})
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == before
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    sim.wait_until_empty()


def test_stop_tokens_and_eos(sim):
    body = {"messages": HELLO, "max_tokens": 2000, "seed": 11}
    choice = sim.http.post(CHAT, json=body).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and "<|eos|>" not in choice["message"]["content"]
    text = choice["message"]["content"]
    stopped = sim.http.post(CHAT, json={**body, "stop_token_ids": [ord(text[5])]}).json()["choices"][0]
    assert stopped["message"]["content"] == text[: text.index(text[5])]
    assert stopped["finish_reason"] == "stop"


def test_logit_bias_is_applied(sim):
    body = {"messages": HELLO, "max_tokens": 5, "logit_bias": {str(ord("z")): 100}}
    assert sim.http.post(CHAT, json=body).json()["choices"][0]["message"]["content"] == "zzzzz"


def test_chat_logprobs(sim):
    body = {"messages": HELLO, "max_tokens": 6, "seed": 1, "logprobs": True, "top_logprobs": 2, "ignore_eos": True}
    choice = sim.http.post(CHAT, json=body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2
    streamed = [c["choices"][0].get("logprobs") for c in events(sim, CHAT, body)]
    assert sum((piece["content"] for piece in streamed if piece), []) == content
    body = {"messages": HELLO, "max_tokens": 2, "logprobs": True, "ignore_eos": True}
    assert sim.http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_messages_of_every_role_and_form(sim):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
        {"role": "user", "content": "e"},
    ]
    assert sim.openai.chat.completions.create(model="sim", messages=messages, max_tokens=1).choices


# --- completions


def test_completion_prompts(sim):
    def texts(prompt, **kwargs):
        ask = {"model": "sim", "prompt": prompt, "max_tokens": 12, "seed": 4, "ignore_eos": True, **kwargs}
        response = sim.openai.completions.create(**extra(ask))
        assert response.id.startswith("cmpl-") and response.object == "text_completion"
        return [choice.text for choice in response.choices]

    [a], [b] = texts("abc"), texts("xyz")
    assert texts(list(b"abc")) == [a]
    assert texts(["abc", "xyz"]) == [a, b]
    assert texts([list(b"abc"), list(b"xyz")]) == [a, b]
    assert texts(["abc", "xyz"], echo=True) == ["abc" + a, "xyz" + b]
    assert texts(list(b"abc"), echo=True) == ["abc" + a]
    assert len(texts(["abc", "xyz"], n=2)) == 4
    chunks = events(sim, COMPLETIONS, {"prompt": "abc", "max_tokens": 12, "seed": 4, "ignore_eos": True, "echo": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc" + a
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_completion_defaults_to_16_tokens(sim):
    body = sim.http.post(COMPLETIONS, json={"prompt": "a", "ignore_eos": True}).json()
    assert body["usage"]["completion_tokens"] == 16


def test_completion_logprobs(sim):
    body = {"prompt": "abc", "max_tokens": 6, "seed": 1, "logprobs": 3, "ignore_eos": True}
    choice = sim.http.post(COMPLETIONS, json=body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == list(range(6))
    assert all(len(top) == 3 for top in logprobs["top_logprobs"])
    assert all(top[token] == value for token, value, top in
               zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]))
    assert all(math.isfinite(value) for value in logprobs["token_logprobs"])
    echoed = sim.http.post(COMPLETIONS, json={**body, "echo": True}).json()["choices"][0]
    assert (echoed["text"], echoed["logprobs"]["tokens"][3:]) == ("abc" + choice["text"], logprobs["tokens"])


# --- what is refused


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temprature", 0.5),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -5),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("max_tokens", -2),
        ("max_tokens", 1.5),
        ("n", 0),
        ("n", 129),
        ("seed", "x"),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 65),
        ("stop", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [257]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"70": 101}),
        ("logit_bias", {"999999": 1}),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("response_format", {"type": "yaml"}),
        ("guided_json", 7),
        ("prompt_logprobs", 21),
        ("min_tokens", -1),
        ("model", 7),
    ],
)
def test_wrong_values_are_named(sim, path, field, value):
    own = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    wrong = error(sim.http.post(path, json={**own, field: value}), 400)
    assert wrong["type"] == "invalid_request_error"
    assert re.split(r"[.\[]", wrong["param"])[0] == field, wrong
    assert field in wrong["message"] or field == "max_tokens", wrong


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {"messages": "Hello"}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": HELLO, "modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"messages": HELLO, "audio": {"voice": "x"}}, "audio"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": 3}, "logprobs"),
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": {"text": "x"}}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "x"]}, "prompt"),
        (COMPLETIONS, {"prompt": [257]}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "best_of": 0}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
        (COMPLETIONS, {"prompt": "x", "logprobs": True}, "logprobs"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "truncate": True}, "truncate"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_wrong_bodies_are_named(sim, path, body, param):
    wrong = error(sim.http.post(path, json=body), 400)
    assert wrong["param"] == param, wrong


def test_images_are_refused_by_name(sim):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match="image_url"):
        sim.openai.chat.completions.create(model="sim", messages=[{"role": "user", "content": [image]}])


def test_fields_without_meaning_are_accepted(sim):
    meaningless = {
        "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "safety_identifier": "s",
        "prompt_cache_key": "k", "parallel_tool_calls": True, "tools": [], "tool_choice": "none",
        "response_format": {"type": "text"}, "modalities": ["text"], "temperature": None, "stop": None,
        "stream_options": None, "functions": None, "reasoning_effort": None,
    }
    assert sim.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, **meaningless}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"7", b'"text"', b'{"prompt": "x",}', b'{"prompt": NaN}', b'{"prompt": "\xff\xfe"}',
        b'{"temperature": 1e999, "prompt": "x"}', b'{"temperature": NaN, "prompt": "x"}', b"[" * 100_000,
        b'{"prompt": "\\ud800"}', b"\x00" * 100,
    ],
)
def test_malformed_bodies(sim, body):
    for path in [CHAT, COMPLETIONS, "/tokenize"]:
        headers = {"content-type": "application/json"}
        assert error(sim.http.post(path, content=body, headers=headers), 400)["type"] == "invalid_request_error"


def test_unknown_fields_can_be_ignored(start):
    """What clients of Ollama and llama.cpp send, on a server that lets it pass."""
    with start("sim", "--unknown-fields", "warn", "--served-model-name", "sim") as server:
        extra = {"keep_alive": 300, "options": {"num_ctx": 4096}, "repeat_penalty": 1.1, "think": False}
        ask = [{"role": "user", "content": "<say>Ignored.</say>"}]
        raw = server.openai.chat.completions.with_raw_response.create(model="sim", messages=ask, max_tokens=-1, extra_body=extra)
        assert raw.headers["x-ignored-fields"] == "keep_alive, options, think"
        assert raw.parse().choices[0].message.content == "Ignored."
        assert server.metric("plimsoll_ignored_fields_total", field="keep_alive") == 1
        assert "x-ignored-fields" not in server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).headers


def test_a_model_is_not_taken_for_a_name():
    ended = subprocess.run([BINARY, "serve", "--served-model-name", "a", "sim"], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2 and "no MODEL was given, and `sim` is taken as a name" in ended.stderr, ended


def test_wrong_model_is_404(sim):
    with pytest.raises(openai.NotFoundError) as info:
        sim.openai.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert (info.value.code, info.value.param) == ("model_not_found", "model")


def test_too_long(sim):
    for body, path, param in [
        ({"prompt": "x" * 4096}, COMPLETIONS, "prompt"),
        ({"prompt": "x" * 4000, "max_tokens": 97}, COMPLETIONS, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, CHAT, "messages"),
    ]:
        wrong = error(sim.http.post(path, json=body), 400)
        assert (wrong["code"], wrong["param"]) == ("context_length_exceeded", param)
        assert "4096" in wrong["message"]


def test_unbounded_chat_uses_the_room_there_is(sim):
    body = {"messages": [{"role": "user", "content": "x" * 3900}], "ignore_eos": True}
    usage = sim.http.post(CHAT, json=body).json()["usage"]
    assert usage["total_tokens"] == 4096


def test_huge_body_is_413(sim):
    response = sim.http.post(COMPLETIONS, content=b'{"prompt": "' + b"x" * (40 << 20) + b'"}')
    assert error(response, 413)["code"] == "request_too_large"
    # The rest of the body is not read, so the connection takes no other request.
    assert response.headers["connection"] == "close"


def test_paths_methods_media_types(sim):
    assert error(sim.http.get("/v1/nothing"), 404)["code"] == "unknown_url"
    wrong = sim.http.get(CHAT)
    assert error(wrong, 405)["code"] == "method_not_supported" and wrong.headers["allow"] == "POST"
    for path in ["/v1/files?limit=1&foo=2", "/v1/batches?foo=2"]:
        wrong = error(sim.http.get(path), 400)
        assert wrong["param"] == "foo" and "unknown parameter `foo`" in wrong["message"]
    form = error(sim.http.post("/v1/files", json={"purpose": "batch"}), 415)
    assert "multipart/form-data" in form["message"]
    both = error(sim.http.post("/tokenize", json={"prompt": "x", "messages": []}), 400)
    assert both["message"] == "`prompt` and `messages` cannot both be set"
    for method, path, flag in [("POST", "/sleep", "--enable-sleep-mode"), ("POST", "/admin/drain", "--enable-admin-api"),
                               ("GET", "/load", "--enable-server-load-tracking"), ("GET", "/tokenizer_info", "--enable-tokenizer-info-endpoint")]:
        off = error(sim.http.request(method, path), 404)
        assert off["code"] == "unknown_url" and off["message"] == f"{path} is turned off: start the server with {flag}"
    assert error(sim.http.post("/health"), 405)
    headers = {"content-type": "text/plain"}
    assert error(sim.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers), 415)


# --- many at once, too many, and those that leave


def test_concurrent_texts_do_not_depend_on_each_other(start):
    # KV for about two of the 48 requests, of which many run at once: most are preempted at some time.
    with start("sim", "--max-model-len", "512", "--max-total-token-num", "1024", "--max-num-seqs", "24") as server:
        def text(i):
            messages = [{"role": "user", "content": f"Number {i}"}]
            ask = {"model": "sim", "messages": messages, "max_tokens": 400, "seed": i, "ignore_eos": True}
            chunks = server.openai.chat.completions.create(**extra(ask), stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        with ThreadPoolExecutor(48) as pool:
            together = list(pool.map(text, range(48)))
        assert server.metric("vllm:num_preemptions_total") > 0
        assert together == [text(i) for i in range(48)]
        server.wait_until_empty()
        assert server.metric("plimsoll_device_allocs_after_ready_total") == 0


# One sequence after the other: what is long for the simulated model is many long sequences.
ONE_BY_ONE = ["--max-model-len", "8192", "--max-num-seqs", "1", "--max-queue", "63"]


def long_request(n: int) -> dict:
    """`n` sequences as long as they can be."""
    return {"messages": HELLO, "max_tokens": 8000, "ignore_eos": True, "n": n}


def long_stream(server, n: int):
    """A stream that is not read."""
    request = server.http.build_request("POST", CHAT, json={**long_request(n), "stream": True})
    return server.http.send(request, stream=True)


def test_full_queue_is_429_and_leaving_makes_room(start):
    # None of them ends before it is left.
    with start("sim:0.005", "--served-model-name", "sim", *ONE_BY_ONE) as server:
        streams = [long_stream(server, 32) for _ in range(2)]
        assert [stream.status_code for stream in streams] == [200, 200]
        response = server.http.post(CHAT, json={"messages": HELLO})
        assert error(response, 429)["code"] == "queue_full"
        assert 1 <= int(response.headers["retry-after"]) <= 60
        with pytest.raises(openai.RateLimitError):
            server.openai.chat.completions.create(model="sim", messages=HELLO, stream=True)
        assert server.metric("plimsoll_requests_refused_total") == 2
        # More sequences than the server ever takes at once is the client's fault, not a matter of time.
        assert error(server.http.post(CHAT, json={"messages": HELLO, "n": 65}), 400)["param"] == "n"
        for stream in streams:
            stream.close()
        server.wait_until_empty()
        assert server.metric("plimsoll_requests_cancelled_total") > 50
        assert server.openai.chat.completions.create(model="sim", messages=HELLO, max_tokens=3).choices


def test_disconnect_cancels_a_request_that_does_not_stream(start):
    with start("sim", *ONE_BY_ONE) as server:
        body = json.dumps(long_request(64)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + body)
            server.wait_for("a running request", lambda: server.metric("plimsoll_requests_running") == 1)
        server.wait_until_empty()
        assert server.metric("plimsoll_requests_cancelled_total") > 50


def test_garbage_on_the_wire_disturbs_nobody(sim):
    for garbage in [b"\x00\xff" * 50, b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 10\r\n\r\n{"]:
        with socket.create_connection(("127.0.0.1", sim.port)) as connection:
            connection.sendall(garbage)
    assert sim.openai.chat.completions.create(model="sim", messages=HELLO, max_tokens=3).choices


def test_server_flags_take_effect(start):
    origin = "https://chat.example"
    flags = ["--seed", "7", "--max-body-size", "1KiB", "--allowed-origins", origin]

    def unseeded(server):
        return [chat(server) for _ in range(2)]

    def chat(server):
        ask = {"messages": HELLO, "temperature": 1, "max_tokens": 32, "ignore_eos": True}
        return server.http.post(CHAT, json=ask).raise_for_status().json()["choices"][0]["message"]["content"]

    with start("sim", *flags) as one, start("sim", *flags) as two, start("sim") as other:
        texts = unseeded(one)
        assert texts == unseeded(two), "--seed makes requests without a seed reproducible"
        assert texts[0] != texts[1] and texts != unseeded(other)
        error(one.http.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 2000}]}), 413)
        assert one.http.get("/version", headers={"origin": origin}).headers["access-control-allow-origin"] == origin
        assert one.http.get("/version", headers={"origin": "https://other.example"}).headers.get("access-control-allow-origin") is None
        assert "access-control-allow-origin" not in other.http.get("/version", headers={"origin": origin}).headers


def test_all_origins_among_others(start):
    with start("sim", "--allowed-origins", '["https://chat.example", "*"]', "https://other.example") as server:
        assert server.http.get("/version", headers={"origin": "https://any.example"}).headers["access-control-allow-origin"] == "*"
        asked = server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 2}, headers={"origin": "https://any.example"})
        assert asked.status_code == 200


def test_sigterm_drains(start):
    # Twice eight thousand tokens take a while where the machine is busy.
    with start("sim", *ONE_BY_ONE, "--drain-timeout", "10m") as server:
        finished = []

        def read():
            with contextlib.closing(long_stream(server, 2)) as response:
                finished.append([line for line in response.iter_lines() if line][-1])

        reader = threading.Thread(target=read)
        reader.start()
        server.wait_for("a running request", lambda: server.metric("plimsoll_requests_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        refused = []

        def refuses():
            try:
                refused.append(server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code)
            except httpx.TransportError:
                return True  # the port is closed already: the drain was quick
            return refused[-1] == 503

        server.wait_for("a refusal", refuses)
        if refused[-1:] == [503]:
            with pytest.raises((httpx.TransportError, AssertionError)):
                assert server.http.get("/ready").status_code == 200
        reader.join(PATIENCE)
        assert finished == ["data: [DONE]"], "a drain finishes what is in"
        assert server.process.wait(PATIENCE) == 0


def test_drain_timeout_fails_what_is_left(start):
    with start("sim", *ONE_BY_ONE, "--drain-timeout", "1", expected_code=6) as server:
        with contextlib.closing(long_stream(server, 64)) as response:
            lines = response.iter_lines()
            next(lines)
            began = time.monotonic()
            server.process.send_signal(signal.SIGINT)
            data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        error = json.loads(data[-2])["error"]
        assert error["code"] == "shutting_down" and "shut down before" in error["message"]
        server.process.wait(PATIENCE)
        assert time.monotonic() - began < 20
