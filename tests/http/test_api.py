"""Parts of the API that operators turn on, and how it is reached."""

import contextlib
import subprocess
import time

import httpx2 as httpx
import pytest

from conftest import BINARY, PATIENCE, process

SAY = [{"role": "user", "content": "<say>abc</say>"}]


@pytest.fixture(scope="module")
def server(start):
    flags = ["--enable-admin-api", "--enable-tokenizer-info-endpoint", "--enable-server-load-tracking", "--return-tokens-as-token-ids",
             "--enable-force-include-usage", "--root-path", "/llm", "--reasoning-parser", "qwen3"]
    with start("sim:0.005", "--served-model-name", "sim", "--max-model-len", "2048", *flags) as server:
        yield server


def ask(server, **fields):
    body = {"model": "sim", "messages": SAY, "max_tokens": 40} | fields
    return server.http.post("/v1/chat/completions", json=body).raise_for_status().json()


def test_tokenizer_info(server, sim):
    info = server.http.get("/tokenizer_info").raise_for_status().json()
    assert info["tokenizer_class"] == "bytes" and "message.role" in info["chat_template"]
    assert sim.http.get("/tokenizer_info").status_code == 404


def test_ping(server):
    assert server.http.get("/ping").status_code == server.http.post("/ping").status_code == 200


def test_the_prefix_cache_is_emptied(server, sim):
    prompt = [{"role": "user", "content": "x" * 400}]
    cached = lambda: ask(server, messages=prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached() == 0 and cached() > 300
    assert server.http.post("/reset_prefix_cache").json() == {"success": True}
    assert cached() == 0 and cached() > 300
    refused = server.http.post("/reset_prefix_cache?reset_external=true")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "reset_external"
    assert sim.http.post("/reset_prefix_cache").status_code == 404


def test_load(server):
    load = lambda: server.http.get("/load").raise_for_status().json()["server_load"]
    assert load() == 0
    hello = [{"role": "user", "content": "hello"}]
    chat = {"model": "sim", "messages": hello, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=chat) as stream:
        # Its end would close the stream.
        lines = stream.iter_lines()
        next(lines)
        assert load() == 1
    server.wait_for("no load", lambda: load() == 0)


def test_forced_usage_and_names_by_id(server):
    stream = server.openai.chat.completions.create(model="sim", messages=SAY, stream=True, logprobs=True)
    chunks = list(stream)
    assert chunks[-1].usage.completion_tokens > 0 and not chunks[-1].choices
    tokens = [token.token for chunk in chunks[:-1] for choice in chunk.choices if choice.logprobs for token in choice.logprobs.content]
    assert tokens[:3] == ["token_id:97", "token_id:98", "token_id:99"]
    first = server.openai.chat.completions.create(
        model="sim", messages=SAY, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert next(iter(first)).usage.completion_tokens == 0
    first.close()


def test_root_path(server):
    for path in ["/llm/health", "/health", "/llm/v1/models"]:
        assert server.http.get(path).status_code == 200, path
    assert server.http.get("/llmx/health").status_code == 404
    assert server.http.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_ends_with_its_budget(server, stream):
    say = [{"role": "user", "content": "<say><think>one two three</think>four</say>"}]
    whole = ask(server, messages=say)["choices"][0]["message"]
    assert (whole["reasoning"], whole["content"]) == ("one two three", "four")
    if stream:
        chunks = server.openai.chat.completions.create(
            model="sim", messages=say, max_tokens=40, stream=True, extra_body={"thinking_token_budget": 7})
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        reasoning = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
    else:
        reasoning = ask(server, messages=say, thinking_token_budget=7)["choices"][0]["message"]["reasoning"]
    assert reasoning == "one two"
    assert ask(server, messages=say, thinking_token_budget=-1)["choices"][0]["message"] == whole
    wrong = {"model": "sim", "messages": say, "thinking_token_budget": -2}
    assert server.http.post("/v1/chat/completions", json=wrong).json()["error"]["param"] == "thinking_token_budget"


def test_thinking_needs_a_model_that_thinks(sim):
    body = {"model": "sim", "messages": SAY, "thinking_token_budget": 5}
    error = sim.http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "thinking_token_budget" and "--reasoning-parser" in error["message"]
    assert sim.http.post("/v1/completions", json={"model": "sim", "prompt": "x", "thinking_token_budget": 5}).status_code == 400


def test_one_logprob_for_each_id(sim):
    for path, prompt in [("/v1/chat/completions", {"messages": SAY, "logprobs": True}),
                         ("/v1/completions", {"prompt": "<say>abc</say>", "logprobs": 1})]:
        of = lambda **more: sim.http.post(path, json={"model": "sim", "max_tokens": 20} | prompt | more).raise_for_status().json()["choices"][0]
        count = lambda choice: len(choice["logprobs"].get("content") or choice["logprobs"]["tokens"])
        plain, ids = of(), of(return_token_ids=True)
        assert plain["finish_reason"] == "stop" and count(plain) == 3
        assert count(ids) == len(ids["token_ids"]) == 4


def test_objects_have_no_more_than_their_properties(sim):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for strict in [True, False]:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
        said = [{"role": "user", "content": '<say>{"a": 1, "b": 2}</say>'}]
        answer = sim.openai.chat.completions.create(model="sim", messages=said, response_format=form, max_tokens=60)
        assert '"b"' not in answer.choices[0].message.content, answer


def test_tokens_of_iterations_are_those_of_requests(start):
    with start("sim", "--served-model-name", "sim", "--max-model-len", "512") as server:
        usages = [server.openai.chat.completions.create(model="sim", messages=SAY, max_tokens=8).usage for _ in range(3)]
        wanted = sum(usage.total_tokens - usage.prompt_tokens_details.cached_tokens for usage in usages)
        server.wait_for("all steps", lambda: server.metric("vllm:iteration_tokens_total_sum") == wanted)
        assert server.metric("vllm:num_requests_waiting_by_reason", reason="capacity") == 0


def test_a_unix_socket(tmp_path):
    path = tmp_path / "socket"
    with process(tmp_path, "sim", "--served-model-name", "sim", "--uds", str(path)) as (child, _, log):
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=PATIENCE) as client:
            end = time.monotonic() + PATIENCE
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/ready").status_code == 200:
                        break
                assert child.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.02)
            answer = client.post("/v1/chat/completions", json={"messages": SAY}).raise_for_status().json()
            assert answer["choices"][0]["message"]["content"] == "abc"
        # The terminal's commands take it as the log names it.
        chat = [BINARY, "chat", "sim", "--url", f"unix:{path}"]
        done = subprocess.run(chat, input="<say>hi</say>", capture_output=True, text=True, timeout=PATIENCE)
        assert (done.returncode, done.stdout) == (0, "hi\n"), done
        assert f"curl --unix-socket {path} http://localhost/v1/chat/completions" in log.read_text()
        child.terminate()
        assert child.wait(60) == 0
    assert not path.exists()
