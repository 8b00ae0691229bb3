"""Bad input: whatever comes over the wire, nothing breaks, nothing leaks, and nobody else notices."""

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import conftest
import pytest

from endpoints import EVERY
from malform import Client, Shot

SEED = int(os.environ.get("BAD_INPUT_SEED", "20261121"))
REQUESTS = int(os.environ.get("BAD_INPUT_REQUESTS", "10000"))
CLIENTS = 2
# Of the well-behaved neighbour, beside each load.
MIN_SAMPLES = 200


@pytest.fixture(scope="module")
def server(start):
    # The queue is longer than what the load can ask for: a 429 would be right and hide the rest.
    with start("sim", "--max-model-len", "1024", "--served-model-name", "sim", "--max-queue", "4096") as server:
        yield server


class Load:
    """Processes of their own, so that the neighbour measures the server and not this interpreter."""

    def __init__(self, server, seed: int, count: int, *flags: str):
        script = Path(__file__).with_name("malform.py")
        each = count // CLIENTS
        self.processes = [
            subprocess.Popen([sys.executable, str(script), str(server.port), str(seed + i), str(each), *flags],
                             stdout=subprocess.PIPE, text=True)
            for i in range(CLIENTS)
        ]

    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def results(self) -> list[dict]:
        outputs = [process.communicate()[0] for process in self.processes]
        assert all(process.returncode == 0 for process in self.processes)
        return [json.loads(output) for output in outputs]


def latencies(server, go_on) -> list[float]:
    """Seconds that small requests take, one after the other, while `go_on()`, and until there are enough of them."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "seed": 1, "ignore_eos": True})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=conftest.PATIENCE)
    taken, answers = [], set()
    while go_on() or len(taken) < MIN_SAMPLES:
        began = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        answers.add((response.status, json.loads(response.read())["choices"][0]["message"]["content"]))
        taken.append(time.perf_counter() - began)
    connection.close()
    assert len(answers) == 1 and min(answers)[0] == 200, "the neighbour got other answers than alone"
    return taken


def p99(samples: list[float]) -> float:
    return sorted(samples)[int(len(samples) * 0.99)]


def resident_bytes(server) -> int:
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_malformed_requests(server):
    print(f"BAD_INPUT_SEED={SEED}")
    alone = latencies(server, lambda: False)
    resident, beside_good, beside_bad, statuses = [], [], [], {}
    # The last fifth comes twice: by then caches and the allocator have seen it.
    for fifth in [0, 1, 2, 3, 4, 4]:
        # The same clients with good requests: what is left beside it is what malformed ones cost. In turns, since others
        # use this machine, too.
        load = Load(server, SEED + CLIENTS * fifth, REQUESTS // 5, "--valid")
        beside_good += latencies(server, load.running)
        for result in load.results():
            assert set(result["statuses"]) == {"200"}, result
        load = Load(server, SEED + CLIENTS * fifth, REQUESTS // 5)
        beside_bad += latencies(server, load.running)
        for result in load.results():
            assert not result["wrong"], f"BAD_INPUT_SEED={SEED}: {json.dumps(result['wrong'], indent=1)}"
            for status, count in result["statuses"].items():
                statuses[status] = statuses.get(status, 0) + count
        server.wait_until_empty()
        resident.append(resident_bytes(server))
    print(f"statuses {statuses}, resident {[size >> 20 for size in resident]} MiB")
    print("p99 of the neighbour in ms: " + ", ".join(
        f"{name} {p99(samples) * 1e3:.1f}" for name, samples in
        [("alone", alone), ("beside good requests", beside_good), ("beside malformed ones", beside_bad)]))

    assert sum(statuses.values()) == REQUESTS + REQUESTS // 5
    # Most are refused, by many different checks; some are odd and still valid.
    assert statuses["400"] > REQUESTS // 2 and {"200", "404", "405", "415"} <= statuses.keys()
    assert server.process.poll() is None and "panic" not in server.log.read_text(errors="replace")
    assert resident[-1] - resident[-2] < 32 << 20, f"resident bytes grow: {resident}"
    # What the cache of grammars may hold, and the largest bodies.
    assert resident[-1] - resident[0] < 512 << 20, f"resident bytes: {resident}"
    assert p99(beside_bad) < 3 * p99(beside_good) + 0.05


def test_a_server_that_embeds(start):
    with start("sim", "--runner", "pooling", "--max-model-len", "1024", "--served-model-name", "embedder") as server:
        for result in Load(server, SEED, 1000).results():
            assert not result["wrong"], f"BAD_INPUT_SEED={SEED}: {json.dumps(result['wrong'], indent=1)}"
        server.wait_until_empty()
        assert "panic" not in server.log.read_text(errors="replace")


def test_the_largest_bodies(server):
    """As large as a body may be, and of what takes the most memory as parsed JSON."""
    body = b'{"prompt": [' + b"[0]," * (7 << 20) + b"[0]]}"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    client = Client(server.port)

    def send() -> None:
        for _ in range(2):
            assert client.send(Shot(head.encode() + body, True))[0] == 400

    sender = threading.Thread(target=send)
    sender.start()
    taken = latencies(server, sender.is_alive)
    sender.join()
    print(f"p99 of the neighbour {p99(taken) * 1e3:.1f} ms, the slowest {max(taken) * 1e3:.1f} ms")
    # Parsing one takes seconds.
    assert p99(taken) < 1
    server.wait_until_empty()


def test_stuck_connections_disturb_nobody(server):
    """Clients that send half a request and wait."""
    import socket

    half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    stuck = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    for i, connection in enumerate(stuck):
        connection.sendall(half[: 1 + i % len(half)])
    done = threading.Event()
    threading.Timer(0.5, done.set).start()
    assert max(latencies(server, lambda: not done.is_set())) < 10
    for connection in stuck:
        connection.close()
    server.wait_until_empty()


def test_every_endpoint_is_attacked(server):
    """An endpoint that is added is added to the list of tests/http/endpoints.py."""
    document = server.http.get("/openapi.json").raise_for_status().json()
    bodies = {path for path, methods in document["paths"].items() if "requestBody" in methods.get("post", {})}
    # A file is no JSON, and a batch needs one: test_batches.py has bad ones of both.
    assert bodies == EVERY.keys() | {"/v1/files", "/v1/batches"}
