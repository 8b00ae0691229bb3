"""Keys, limits per key, deadlines, priority, request ids, the access log, and clients that read nothing or vanish."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anthropic
import conftest
import httpx2 as httpx
import openai
import pytest
from test_sim import CHAT, HELLO, error

KEYS = "# who may\nalice secret-of-alice\nbob secret-of-bob\n"


def bearer(key: str) -> dict:
    return {"authorization": f"Bearer {key}"}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("access")


@pytest.fixture(scope="module")
def keyed(start, files):
    """A server with two keys in a file, one by flag, one sequence at a time, and an access log."""
    (files / "keys").write_text(KEYS)
    flags = ["--api-key-file", str(files / "keys"), "--api-key", "secret-of-nobody", "--access-log", str(files / "log"),
             "--max-num-seqs", "1", "--max-queue", "200", "--max-model-len", "8192", "--scheduling-policy", "priority"]
    with start("sim", "--served-model-name", "sim", *flags) as server:
        server.http.headers.update(bearer("secret-of-alice"))
        yield server
        secrets = ["secret-of-alice", "secret-of-bob", "secret-of-nobody", "secret-of-mallory"]
        told = server.log.read_text() + (files / "log").read_text()
        assert not [secret for secret in secrets if secret in told], "no key is logged"


def client(server, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=120)


def test_keys(keyed):
    for key in ["secret-of-alice", "secret-of-bob", "secret-of-nobody"]:
        assert client(keyed, key).chat.completions.create(model="sim", messages=HELLO, max_tokens=2).choices
    for wrong in ["secret-of-mallory", "secret-of-alic", "secret-of-alicee"]:
        with pytest.raises(openai.AuthenticationError) as info:
            client(keyed, wrong).models.list()
        assert info.value.code == "invalid_api_key" and wrong not in str(info.value)
    with httpx.Client(base_url=keyed.url) as nobody:
        refused = nobody.post(CHAT, json={"messages": HELLO})
        assert error(refused, 401)["type"] == "invalid_request_error"
        assert refused.headers["www-authenticate"] == "Bearer"
        # Anthropic's clients name it otherwise.
        assert nobody.get("/v1/models", headers={"x-api-key": "secret-of-bob"}).status_code == 200
        for open_to_all in ["/health", "/ready", "/metrics"]:
            assert nobody.get(open_to_all).status_code == 200
        for closed in ["/version", "/memory", "/sleep", "/wake_up", "/tokenize"]:
            assert nobody.get(closed).status_code == 401


def test_a_refused_request_leaves_its_connection_usable(keyed):
    """Clients send head and body in two pieces, and try again on the same connection."""
    body = json.dumps({"messages": HELLO, "max_tokens": 2}).encode()
    with socket.create_connection(("127.0.0.1", keyed.port), timeout=conftest.PATIENCE) as connection, connection.makefile("rb") as answers:
        for key, status in [("secret-of-mallory", 401), ("secret-of-mallory", 401), ("secret-of-alice", 200)]:
            connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                               f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            time.sleep(0.05)
            connection.sendall(body)
            assert answers.readline().split()[1:2] == [str(status).encode()]
            headers = dict(line.lower().strip().split(b": ", 1) for line in iter(answers.readline, b"\r\n"))
            assert json.loads(answers.read(int(headers[b"content-length"])))


def test_a_changed_key_file_takes_effect(keyed, files):
    def write(text: str) -> None:
        # As an editor does it: whoever looks sees the file before or after.
        (files / "keys.new").write_text(text)
        (files / "keys.new").replace(files / "keys")

    write(KEYS + "carol secret-of-carol\n")
    models = lambda: keyed.http.get("/v1/models", headers=bearer("secret-of-carol")).status_code
    keyed.wait_for("the new key", lambda: models() == 200)
    # What is no key file changes nothing.
    write("too many words\n")
    keyed.wait_for("a warning", lambda: "the list of API keys is unchanged" in keyed.log.read_text())
    assert models() == 200
    write(KEYS)
    keyed.wait_for("the end of the key", lambda: models() == 401)
    assert keyed.http.get("/v1/models").status_code == 200


def test_access_log(keyed, files):
    asked = {"messages": HELLO, "max_tokens": 4, "ignore_eos": True}
    answer = keyed.http.post(CHAT, json=asked, headers={"x-request-id": "logged-1"})
    assert answer.json()["id"] == "chatcmpl-logged-1" and answer.headers["x-request-id"] == "logged-1"
    keyed.http.post(CHAT, json={"messages": HELLO, "max_tokens": -2}, headers={"x-request-id": "logged-2"})
    by_id = lambda name: [line for line in lines(files / "log") if line["request_id"] == name]
    keyed.wait_for("both lines", lambda: by_id("logged-1") and by_id("logged-2"))
    [line] = by_id("logged-1")
    assert (line["key"], line["method"], line["path"], line["status"]) == ("alice", "POST", CHAT, 200)
    assert line["model"] == "sim" and line["finish_reasons"] == ["length"] and line["complete"]
    assert (line["prompt_tokens"], line["output_tokens"]) == (answer.json()["usage"]["prompt_tokens"], 4)
    assert 0 <= line["queued"] <= line["first_token"] <= line["duration"] < 60
    assert abs(line["time"] - time.time()) < 600
    [line] = by_id("logged-2")
    assert line["status"] == 400 and "prompt_tokens" not in line


def test_the_only_key_has_the_whole_queue(start):
    """Where there are others, some of it would be kept for them."""
    with start("sim:0.005", "--api-key", "sesame", "--max-num-seqs", "1", "--max-queue", "9") as server, contextlib.ExitStack() as streams:
        body = {"messages": HELLO, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        ask = lambda: streams.enter_context(server.http.stream("POST", CHAT, json=body, headers=bearer("sesame")))
        assert {ask().status_code for _ in range(10)} == {200}
        refused = ask()
        refused.read()
        assert error(refused, 429)["code"] == "queue_full"


def first_token(server, key: str, **fields) -> float:
    """When the first token of a stream came."""
    body = {"messages": HELLO, "max_tokens": 1, "ignore_eos": True, "stream": True, **fields}
    with httpx.stream("POST", server.url + CHAT, json=body, headers=bearer(key), timeout=120) as response:
        assert response.status_code == 200, response.read()
        next(line for line in response.iter_lines() if line.startswith("data: "))
        return time.monotonic()


def occupied(server, key: str, n: int):
    """A stream of `n` long sequences of that key."""
    body = {"messages": HELLO, "max_tokens": 8000, "ignore_eos": True, "stream": True, "n": n}
    request = server.http.build_request("POST", CHAT, json=body, headers=bearer(key))
    return contextlib.closing(server.http.send(request, stream=True))


def test_a_key_with_many_requests_does_not_starve_another(keyed):
    with occupied(keyed, "secret-of-alice", 100) as flood:
        assert flood.status_code == 200
        keyed.wait_for("the flood", lambda: keyed.metric("plimsoll_requests_waiting") >= 90)
        first_token(keyed, "secret-of-bob")
        assert keyed.metric("plimsoll_requests_waiting") > 90, "bob did not wait for alice's others"
        # Nor does she take every place: the rest is for others.
        with occupied(keyed, "secret-of-alice", 100) as more:
            assert error_of(more, 429)["code"] == "queue_full"
    keyed.wait_until_empty()


def error_of(stream: httpx.Response, status: int) -> dict:
    assert stream.status_code == status
    return json.loads(stream.read())["error"]


def test_priority(keyed):
    before = keyed.metric("plimsoll_requests_submitted_total")
    with ThreadPoolExecutor(2) as pool:
        with occupied(keyed, "secret-of-alice", 40):
            keyed.wait_for("a running request", lambda: keyed.metric("plimsoll_requests_running") == 1)
            low = pool.submit(first_token, keyed, "secret-of-alice", priority=5)
            keyed.wait_for("it waits", lambda: keyed.metric("plimsoll_requests_submitted_total") - before == 41)
            high = pool.submit(first_token, keyed, "secret-of-alice", priority=-5)
            high.result()
            assert not low.done(), "it goes behind the others"
        assert high.result() < low.result()
    keyed.wait_until_empty()


def test_deadlines(keyed):
    long = {"messages": HELLO, "max_tokens": 8000, "ignore_eos": True, "n": 20}
    began = time.monotonic()
    late = error(keyed.http.post(CHAT, json={**long, "timeout": 0.5}), 504)
    assert late["code"] == "deadline_exceeded" and time.monotonic() - began < 20
    keyed.wait_until_empty()
    late = keyed.http.post(CHAT, json=long, headers={"x-request-timeout": "0.5"})
    assert error(late, 504)["code"] == "deadline_exceeded"
    # Official clients would try twice more.
    assert late.headers["x-should-retry"] == "false"
    assert "request failed" not in keyed.log.read_text(errors="replace")
    with keyed.http.stream("POST", CHAT, json={**long, "timeout": 0.5, "stream": True}) as response:
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]" and json.loads(data[-2])["error"]["code"] == "deadline_exceeded"
    keyed.wait_until_empty()
    assert error(keyed.http.post(CHAT, json={**long, "timeout": -1}), 400)["param"] == "timeout"


def test_responses_belong_to_the_key_that_made_them(keyed):
    alice, bob = client(keyed, "secret-of-alice"), client(keyed, "secret-of-bob")
    # Who names the request names no response.
    named = {"x-request-id": "resp_1"}
    first = alice.responses.create(model="sim", input="secret", max_output_tokens=4, extra_headers=named)
    again = bob.responses.create(model="sim", input="other", max_output_tokens=4, extra_headers=named)
    assert first.id.startswith("resp_") and "1" != first.id.removeprefix("resp_") and first.id != again.id
    for attempt in [
        lambda: bob.responses.retrieve(first.id),
        lambda: bob.responses.input_items.list(first.id),
        lambda: bob.responses.create(model="sim", input="?", previous_response_id=first.id),
        lambda: bob.responses.create(model="sim", input=[{"type": "item_reference", "id": first.output[0].id}]),
        lambda: bob.responses.delete(first.id),
        lambda: bob.responses.retrieve("resp_1"),
    ]:
        with pytest.raises(openai.NotFoundError):
            attempt()
    # An item's id is the client's choice: both may choose the same.
    for who, text in [(alice, "mine"), (bob, "yours")]:
        item = {"type": "message", "id": "msg_1", "role": "user", "content": text}
        who.responses.create(model="sim", input=[item], max_output_tokens=2)
    for who, text in [(alice, "mine"), (bob, "yours")]:
        told = who.responses.create(model="sim", input=[{"type": "item_reference", "id": "msg_1"}], max_output_tokens=2)
        assert [item.content[0].text for item in who.responses.input_items.list(told.id)] == [text]
    assert alice.responses.retrieve(first.id).id == first.id
    alice.responses.delete(first.id)


def test_errors_on_anthropics_paths_are_anthropics(start, keyed, files):
    """Also those that no handler of theirs made."""
    ask = {"model": "sim", "max_tokens": 2, "messages": HELLO}

    def caught(server, key: str, expected, **fields) -> anthropic.APIStatusError:
        with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=120) as one:
            calls = [one.messages.create] if "stream" in fields else [one.messages.create, one.messages.count_tokens]
            for call in calls:
                body = {**ask, **fields}
                if call == one.messages.count_tokens:
                    del body["max_tokens"]
                with pytest.raises(expected) as info:
                    call(**body)
                body = info.value.response.json()
                assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
                assert set(body["error"]) == {"type", "message"} and key not in body["error"]["message"]
                assert body["request_id"] == info.value.request_id
        return info.value

    assert caught(keyed, "secret-of-mallory", anthropic.AuthenticationError).type == "authentication_error"
    assert caught(keyed, "secret-of-alice", anthropic.NotFoundError, model="none").type == "not_found_error"
    assert caught(keyed, "secret-of-alice", anthropic.BadRequestError, messages=[]).type == "invalid_request_error"

    (files / "anthropic").write_text(KEYS)
    flags = ["--api-key-file", str(files / "anthropic"), "--requests-per-minute-per-key", "4", "--max-body-size", "4KiB"]
    with start("sim", "--served-model-name", "sim", *flags) as server:
        large = [{"role": "user", "content": "x" * 5000}]
        error = caught(server, "secret-of-bob", anthropic.APIStatusError, messages=large)
        assert (error.status_code, error.type) == (413, "request_too_large")
        codes = set()
        for _ in range(6):
            response = httpx.post(f"{server.url}/v1/messages", json=ask, headers=bearer("secret-of-alice"))
            codes.add(response.status_code)
        assert codes == {200, 429} and int(response.headers["retry-after"]) >= 1
        assert caught(server, "secret-of-alice", anthropic.RateLimitError).type == "rate_limit_error"

    # While it drains, what runs may end and all else is told to go elsewhere.
    with start("sim", "--served-model-name", "sim", "--max-model-len", "8192", "--max-num-seqs", "1") as server:
        with occupied(server, "nobody", 40):
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("the drain", lambda: server.http.get("/ready").status_code == 503)
            error = caught(server, "none", anthropic.APIStatusError, stream=False)
            assert (error.status_code, error.type) == (503, "overloaded_error")
        assert server.process.wait(60) == 0


# --- limits of each key


def test_limits_per_key(start, files):
    (files / "limited").write_text(KEYS)
    flags = ["--api-key-file", str(files / "limited"), "--requests-per-minute-per-key", "6",
             "--max-concurrent-requests-per-key", "2", "--tokens-per-minute-per-key", "1000000"]
    with start("sim", *flags) as server:
        ask = {"messages": HELLO, "max_tokens": 1}
        post = lambda key, **kwargs: server.http.post(CHAT, json=ask, headers=bearer(key), **kwargs)
        first = post("secret-of-alice")
        assert first.headers["x-ratelimit-remaining-requests"] == "5"
        assert first.headers["x-ratelimit-limit-tokens"] == "1000000"
        codes = [post("secret-of-alice").status_code for _ in range(7)]
        assert codes[:5] == [200] * 5 and 429 in codes[5:]
        refused = error(post("secret-of-alice"), 429)
        assert (refused["code"], refused["type"]) == ("rate_limit_exceeded", "requests")
        with pytest.raises(openai.RateLimitError):
            client(server, "secret-of-alice").chat.completions.create(model="sim", messages=HELLO)
        with occupied(server, "secret-of-bob", 30) as one, occupied(server, "secret-of-bob", 30) as two:
            assert one.status_code == two.status_code == 200
            assert error(post("secret-of-bob"), 429)["code"] == "rate_limit_exceeded"
        server.wait_until_empty()
        server.wait_for("bob's places", lambda: post("secret-of-bob").status_code == 200)


def test_queue_timeout(start):
    with start("sim", "--max-num-seqs", "1", "--max-model-len", "8192", "--queue-timeout", "0.5") as server:
        with occupied(server, "nobody", 1), occupied(server, "nobody", 1):
            pass
        body = {"messages": HELLO, "max_tokens": 8000, "ignore_eos": True, "n": 60}
        refused = server.http.post(CHAT, json=body)
        assert error(refused, 429)["code"] == "queue_timeout"
        assert int(refused.headers["retry-after"]) >= 1
        server.wait_until_empty()
        # First come, first served is the default: priorities are refused, not ignored.
        assert error(server.http.post(CHAT, json={"messages": HELLO, "priority": 1}), 400)["param"] == "priority"


# --- clients that do not behave


@pytest.fixture(scope="module")
def hard(start):
    """A server without patience."""
    flags = ["--slow-client-timeout", "1", "--header-timeout", "1", "--max-connections", "8"]
    with start("sim", "--max-model-len", "8192", *flags) as server:
        yield server


def long_stream(n: int = 32) -> bytes:
    body = {"messages": HELLO, "max_tokens": 8000, "ignore_eos": True, "stream": True, "n": n}
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def test_a_client_that_reads_nothing_holds_no_kv_for_long(hard):
    cancelled, submitted = [hard.metric(f"plimsoll_requests_{what}_total") for what in ["cancelled", "submitted"]]
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", hard.port))
        reader.sendall(long_stream())
        hard.wait_for("its requests", lambda: hard.metric("plimsoll_requests_submitted_total") > submitted)
        hard.wait_until_empty()
        assert hard.metric("plimsoll_requests_cancelled_total") > cancelled


def test_a_client_that_is_stopped_holds_no_kv_for_long(hard):
    program = f"import socket; s = socket.create_connection(('127.0.0.1', {hard.port})); s.sendall({long_stream()!r})\n" \
        "while s.recv(4096): pass"
    cancelled, submitted = [hard.metric(f"plimsoll_requests_{what}_total") for what in ["cancelled", "submitted"]]
    child = subprocess.Popen([sys.executable, "-c", program])
    try:
        hard.wait_for("its requests", lambda: hard.metric("plimsoll_requests_submitted_total") > submitted)
        os.kill(child.pid, signal.SIGSTOP)
        hard.wait_until_empty()
        assert child.poll() is None
        assert hard.metric("plimsoll_requests_cancelled_total") > cancelled
    finally:
        child.kill()
        child.wait()


def test_a_client_that_vanishes_is_looked_for(hard):
    """The server's side of a connection has a keepalive timer: without a word from the client, the kernel ends it."""
    with socket.create_connection(("127.0.0.1", hard.port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        connection.recv(4096)
        own = connection.getsockname()[1]
        # local, remote, state, queues, timer: 02 is keepalive
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        timers = [row[5][:2] for row in rows if row[1].endswith(f":{hard.port:04X}") and row[2].endswith(f":{own:04X}")]
        assert timers == ["02"]


@pytest.mark.parametrize("said", [b"", b"G", b"PRI * HT", b"POST / HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_client_that_says_nothing_is_shown_out(hard, said):
    with socket.create_connection(("127.0.0.1", hard.port), timeout=30) as connection:
        connection.sendall(said)
        began = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
        assert time.monotonic() - began < 20


def test_connections_are_bounded(hard):
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", hard.port), timeout=30)) for _ in range(12)]

        def closed(connection) -> bool:
            connection.settimeout(0.2)
            try:
                return connection.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionResetError:
                return True

        assert any([closed(connection) for connection in idle]), "one more than may be is closed at once"

    def has_room() -> bool:
        # Until the server has seen that those are closed, it closes this one too.
        with contextlib.suppress(httpx.TransportError):
            return hard.http.get("/health").status_code == 200
        return False

    hard.wait_for("room", has_room)
