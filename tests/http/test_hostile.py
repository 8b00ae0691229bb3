"""Small requests that would cost much, and clients that take without reading."""

import concurrent.futures
import contextlib
import json
import re
import socket
import threading
import time
from pathlib import Path

import pytest
import raw_http2
from conftest import PATIENCE
from test_limits import bearer
from test_sim import CHAT, HELLO, error

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
MIB = 1 << 20
KEYS = "alice secret-of-alice\nbob secret-of-bob\n"


TIMEOUTS = ["--slow-client-timeout", "2", "--header-timeout", "4"]


@pytest.fixture(scope="module")
def server(start):
    flags = [*TIMEOUTS, "--response-store-max-bytes", "48MiB"]
    with start("sim", "--max-model-len", "4096", "--served-model-name", "sim", *flags) as server:
        yield server


@contextlib.contextmanager
def grows_by_at_most(server, most: int):
    """The most memory that the process holds at any time in the block is so many bytes more than before."""
    process = Path(f"/proc/{server.process.pid}")
    kib = lambda name: int(re.search(rf"{name}:\s+(\d+) kB", (process / "status").read_text())[1]) << 10
    before = kib("VmRSS")
    # The high water is now what is held.
    (process / "clear_refs").write_text("5")
    yield
    grown = kib("VmHWM") - before
    print(f"grew by {grown >> 20} MiB")
    assert grown <= most, f"{grown >> 20} MiB"


def test_choices_are_counted_before_they_cost(server):
    with grows_by_at_most(server, 150 * MIB):
        body = {"prompt": ["Hello there"] * 50_000, "n": 128, "max_tokens": 1}
        refused = error(server.http.post(COMPLETIONS, json=body), 400)
    assert refused["param"] == "n" and "6400000 sequences" in refused["message"]


def test_a_conversation_is_not_retold_beyond_what_fits(server):
    last = None
    for _ in range(3):
        items = [{"role": "user", "content": "x" * (5 * MIB)}, {"role": "user", "content": "Hello"}]
        body = {"input": items, "truncation": "auto", "max_output_tokens": 1, "previous_response_id": last}
        answer = server.http.post(RESPONSES, json=body)
        assert answer.status_code == 200, answer.text
        last = answer.json()["id"]
    ask = {"input": "And?", "previous_response_id": last, "max_output_tokens": 1}
    with grows_by_at_most(server, 64 * MIB), concurrent.futures.ThreadPoolExecutor(8) as pool:
        small = lambda _: server.http.post(RESPONSES, json={**ask, "truncation": "auto"}).status_code
        assert set(pool.map(small, range(16))) == {200}
    refused = error(server.http.post(RESPONSES, json=ask), 400)
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "previous_response_id")


def test_the_store_counts_what_it_takes(server):
    # What a function answers with is kept, and no template reads it.
    tool = {"type": "function", "name": "f", "output_schema": {"enum": [0] * 200_000}}
    body = json.dumps({"input": "Hello", "max_output_tokens": 1, "tools": [tool], "tool_choice": "none"})
    send = lambda: server.http.post(RESPONSES, content=body, headers={"content-type": "application/json"}).raise_for_status()
    for _ in range(4):
        send()
    with grows_by_at_most(server, 100 * MIB):
        for _ in range(40):
            send()


@pytest.mark.parametrize("field,value", [
    ("stop_token_ids", [7] * 500_000),
    ("stop", ["x" * 400_000] * 64),
    ("stop", ["x" * 1025]),
])
def test_what_is_looked_for_per_token_is_bounded(server, field, value):
    refused = error(server.http.post(COMPLETIONS, json={"prompt": "Hello", "n": 31, field: value}), 400)
    assert refused["param"] == field and "at most" in refused["message"]


def test_stop_tokens_may_repeat(server):
    body = {"prompt": "Hello", "max_tokens": 3, "stop_token_ids": [7] * 256, "stop": "x" * 1024}
    assert server.http.post(COMPLETIONS, json=body).status_code == 200


# --- bodies


def test_unfinished_bodies_have_a_bound_in_all(server):
    size = 31 * MIB
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    began = head.encode() + b'{"messages": "' + b"x" * (size - 1000)
    connections = [socket.create_connection(("127.0.0.1", server.port), timeout=90) for _ in range(10)]

    def send(connection) -> None:
        # Those that find no room are answered while they send.
        with contextlib.suppress(OSError):
            connection.sendall(began)

    answers = []

    def hear(connection) -> None:
        with contextlib.suppress(OSError):
            answers.append(connection.recv(4096))

    with grows_by_at_most(server, 200 * MIB):
        threads = [threading.Thread(target=run, args=[connection], daemon=True)
                   for connection in connections for run in (send, hear)]
        for thread in threads:
            thread.start()
        # Small ones need no room.
        answer = server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 2})
        assert answer.status_code == 200
        full = lambda: sum(b"too_many_large_requests" in answer for answer in answers) >= 4
        server.wait_for("refusals", full)
    assert all(b" 503 " in answer and b"retry-after" in answer for answer in answers if b"too_many" in answer)
    for connection in connections:
        # While a thread receives, closing alone would tell the server nothing.
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    large = {"messages": [{"role": "user", "content": "x" * (20 * MIB)}]}
    server.wait_for("room", lambda: server.http.post(CHAT, json=large).status_code == 400)


# --- HTTP/2


@pytest.fixture
def stored(server) -> str:
    """The path of a response of megabytes."""
    items = [{"role": "user", "content": "Hello"}]
    body = {"input": items, "instructions": "x" * 100, "max_output_tokens": 1, "metadata": {}}
    tool = {"type": "function", "name": "f", "output_schema": {"title": "x" * (3 * MIB)}}
    answer = server.http.post(RESPONSES, json={**body, "tools": [tool], "tool_choice": "none"})
    assert answer.status_code == 200, answer.text
    return f"{RESPONSES}/{answer.json()['id']}"


@pytest.mark.parametrize("window", [0, 1, 100_000])
def test_an_h2_client_that_takes_nothing_is_cut_off(server, stored, window):
    with grows_by_at_most(server, 250 * MIB):
        client = raw_http2.Client(server.port, window)
        for _ in range(60):
            # One more than may be open is refused.
            client.get(stored)
        server.wait_for("answers", lambda: len(client.answered) >= 32)
        assert len(client.answered) == 32
        began = time.monotonic()
        assert client.closed.wait(PATIENCE), "it is closed"
        print(f"cut off after {time.monotonic() - began:.1f} s with {client.taken} bytes taken")
    # Its answers are gone.
    server.wait_until_empty()
    assert server.http.get(stored).status_code == 200


def test_an_h2_client_that_takes_all_is_served(server, stored):
    client = raw_http2.Client(server.port, 8 * MIB)
    # The window of the whole connection, which begins with 64 KiB.
    client.write(raw_http2.frame(raw_http2.WINDOW_UPDATE, 0, 0, (64 * MIB).to_bytes(4)))
    for _ in range(4):
        client.get(stored)
    server.wait_for("all data", lambda: client.taken > 4 * 3 * MIB)
    assert not client.closed.is_set()
    # It goes on to answer pings, and asks for nothing.
    assert client.closed.wait(PATIENCE), "an idle connection ends"


def test_an_h2_client_that_waits_for_its_answer_is_not_cut_off(start):
    """Its answer takes longer than the timeouts: at least six seconds."""
    body = json.dumps({"messages": HELLO, "max_tokens": 3000, "ignore_eos": True}).encode()
    headers = [(":method", "POST"), (":scheme", "http"), (":path", CHAT), (":authority", "x"),
               ("content-type", "application/json")]
    block = b"".join(raw_http2.literal(*header) for header in headers)
    with start("sim:0.002", "--max-model-len", "4096", *TIMEOUTS) as server:
        client = raw_http2.Client(server.port, 8 * MIB)
        client.write(raw_http2.frame(raw_http2.WINDOW_UPDATE, 0, 0, (64 * MIB).to_bytes(4)))
        client.write(raw_http2.frame(raw_http2.HEADERS, raw_http2.END_HEADERS, 1, block))
        client.write(raw_http2.frame(raw_http2.DATA, raw_http2.END_STREAM, 1, body))
        server.wait_for("an answer", lambda: client.answered and client.taken > 1000 or client.closed.is_set())
        assert not client.closed.is_set()
        client.close()


# --- keys


def test_keys_share_no_prefix(start, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    ask = {"prompt": "A load line is painted on every ship. " * 10, "max_tokens": 1}

    def cached(key: str, **fields) -> int:
        answer = server.http.post(COMPLETIONS, json={**ask, **fields}, headers=bearer(key)).raise_for_status()
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    with start("sim", "--api-key-file", str(keys), "--isolate-prefix-cache") as server:
        for key in ["secret-of-alice", "secret-of-bob"]:
            assert cached(key) == 0 and cached(key) > 0
            assert cached(key, cache_salt="mine") == 0 and cached(key, cache_salt="mine") > 0


# --- failures


def test_a_failed_stream_is_not_kept(start):
    with start("sim:fail=40", "--served-model-name", "sim") as server:
        kept = set()
        for _ in range(20):
            body = {"input": "<say>Hello, hello, hello.</say>", "max_output_tokens": 10, "stream": True}
            with server.http.stream("POST", RESPONSES, json=body) as response:
                events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
            last = events[-1]
            found = server.http.get(f"{RESPONSES}/{last['response']['id']}").status_code
            kept.add((last["type"].removeprefix("response."), found))
        assert ("failed", 404) in kept and kept <= {("failed", 404), ("completed", 200), ("incomplete", 200)}, kept
