"""The load balancer of docs/operations.md: its very text, run by nginx before two servers."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
from conftest import ROOT, free_port
from test_sim import COMPLETIONS, error

GUIDE = ROOT / "docs/operations.md"
# Seconds for what a busy machine does.
PATIENCE = 60


class Nginx:
    """nginx with the guide's block, for `servers`."""

    def __init__(self, directory: Path, block: str, servers: list):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=120)
        self.log = directory / "access.log"
        self.servers = servers
        upstream = "".join(f"server 127.0.0.1:{server.port} max_fails=0;" for server in servers)
        block, lines = re.subn(r"(\s*server 127\.0\.0\.1:800\d max_fails=0;)+", upstream, block)
        block, listening = re.subn(r"\blisten 8000;", f"listen 127.0.0.1:{self.port};", block)
        assert (lines, listening) == (1, 1), block
        paths = "".join(f"{name}_temp_path {directory}/{name};" for name in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"])
        self.config = directory / "nginx.conf"
        self.config.write_text(
            f"daemon off; user root; pid {directory}/pid; error_log stderr; events {{}}\n"
            f"http {{ {paths} log_format who '$http_x_request_id $upstream_addr'; access_log {self.log} who;\n{block} }}\n",
        )
        self.process = None

    def __enter__(self):
        tool = subprocess.run([ROOT / "scripts/install-tool", "nginx", "nginx"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        self.process = subprocess.Popen([tool, "-e", "stderr", "-p", self.config.parent, "-c", self.config])
        end = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self.port)):
                return self
            assert time.monotonic() < end, "nginx does not listen"
            time.sleep(0.02)
        raise AssertionError(f"nginx ended with {self.process.returncode}")

    def __exit__(self, *problem):
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE) == 0

    def ask(self, name: str, tokens: int = 1, client=None, **more) -> httpx.Response:
        body = {"model": "sim", "prompt": "Hi", "max_tokens": tokens, "ignore_eos": True, "seed": 7, **more}
        return (client or self.http).post(COMPLETIONS, json=body, headers={"x-request-id": name})

    def answered(self, name: str) -> list[int]:
        """Ports that were asked for the request of that name, until one answered."""
        self.servers[-1].wait_for(f"nginx's line about {name}", lambda: f"{name} " in self.log.read_text())
        [line] = [line for line in self.log.read_text().splitlines() if line.startswith(f"{name} ")]
        return [int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", line)]


def server_block() -> str:
    [block] = re.findall(r"```nginx\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return block


@pytest.fixture(scope="module")
def two(start):
    flags = ["--served-model-name", "sim", "--max-num-seqs", "4", "--max-queue", "2", "--max-model-len", "4096", "--enable-sleep-mode"]
    with start("sim:0.005", *flags) as one, start("sim:0.005", *flags) as other:
        yield [one, other]


@pytest.fixture(scope="module")
def nginx(tmp_path_factory, two):
    with Nginx(tmp_path_factory.mktemp("nginx"), server_block(), two) as nginx:
        yield nginx


def test_what_is_generated_passes_at_once_and_who_leaves_is_noticed(tmp_path, start):
    with start("sim:0.25", "--served-model-name", "sim", "--max-model-len", "256") as slow, Nginx(tmp_path, server_block(), [slow]) as nginx:
        # So short that nginx, left to itself, would wait for the end of it.
        body = {"model": "sim", "prompt": "Hi", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with nginx.http.stream("POST", COMPLETIONS, json=body, timeout=PATIENCE) as answer:
            slow.wait_for("a second token", lambda: slow.metric("plimsoll_generation_tokens_total") >= 2)
            slow.process.send_signal(signal.SIGSTOP)
            try:
                first = next(line for line in answer.iter_lines() if line.startswith("data: "))
            finally:
                slow.process.send_signal(signal.SIGCONT)
            assert json.loads(first.removeprefix("data: "))["choices"]
        slow.wait_for("an end", lambda: slow.metric("plimsoll_requests_in_flight") == 0)
        assert slow.metric("plimsoll_generation_tokens_total") < 200


def test_large_bodies_and_answers_pass_whole(nginx, two):
    answer = nginx.ask("large", 400, n=4, logprobs=5)
    # More than nginx would hold in memory.
    assert len(answer.content) > 80_000, len(answer.content)
    [direct] = [server.http for server in two if server.port == nginx.answered("large")[0]]
    choices = [json.loads(one.content)["choices"] for one in (answer, nginx.ask("direct", 400, direct, n=4, logprobs=5))]
    assert choices[0] == choices[1]

    # As large as may be, and one byte more.
    limit = 32 << 20
    small = json.dumps({"model": "sim", "prompt": "Hi", "max_tokens": 1}).encode()
    headers = {"content-type": "application/json"}
    assert nginx.http.post(COMPLETIONS, content=small.ljust(limit), headers=headers).status_code == 200
    assert nginx.http.post(COMPLETIONS, content=small.ljust(limit + 1), headers=headers).status_code == 413


def test_ids_pass_both_ways_and_pages_are_known_by_their_host(nginx):
    assert nginx.ask("an-id.1").headers["x-request-id"] == "an-id.1"
    fresh = nginx.http.get("/v1/models").headers["x-request-id"]
    assert len(fresh) >= 16 and fresh != nginx.http.get("/v1/models").headers["x-request-id"]
    body = {"model": "sim", "prompt": "Hi", "max_tokens": 1}
    assert nginx.http.post(COMPLETIONS, json=body, headers={"origin": nginx.url}).status_code == 200
    foreign = nginx.http.post(COMPLETIONS, json=body, headers={"origin": "http://evil.example"})
    assert error(foreign, 403)["code"] == "origin_not_allowed"


def test_a_server_that_is_not_ready_is_passed_over(nginx, two):
    ports = [server.port for server in two]
    one, other = two
    one.http.post("/sleep").raise_for_status()
    try:
        assert one.http.get("/ready").status_code == 503
        asked = []
        for turn in range(8):
            assert nginx.ask(f"asleep-{turn}").status_code == 200
            asked.append(nginx.answered(f"asleep-{turn}"))
        assert {tuple(chain) for chain in asked} == {(ports[1],), (ports[0], ports[1])}
        other.http.post("/sleep").raise_for_status()
        refused = nginx.ask("all-asleep")
        assert error(refused, 503)["code"] == "sleeping" and sorted(nginx.answered("all-asleep")) == sorted(ports)
    finally:
        for server in two:
            server.http.post("/wake_up").raise_for_status()
    assert {nginx.ask(f"awake-{turn}").status_code for turn in range(8)} == {200}
    assert {nginx.answered(f"awake-{turn}")[-1] for turn in range(8)} == set(ports)


def test_where_all_are_full_clients_hear_when_to_come_again(nginx, two):
    """Not nginx's 502, which it has for servers that it put aside."""
    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda turn: nginx.ask(f"full-{turn}", 300), range(40)))
    assert {answer.status_code for answer in answers} == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert error(answer, 429)["code"] and int(answer.headers["retry-after"]) >= 1
    # Everybody who could be served was, and each has room again.
    assert sum(answer.status_code == 200 for answer in answers) >= 12
    assert nginx.ask("after").status_code == 200


def test_conversations_stay_where_they_began(tmp_path, two):
    [instead] = re.findall(r"`(hash [^`]+;)`", GUIDE.read_text())
    block, replaced = re.subn(r"\bleast_conn;", instead, server_block())
    assert replaced == 1
    with Nginx(tmp_path, block, two) as nginx:
        def who(name: str, headers: dict) -> int:
            body = {"model": "sim", "prompt": "Hi", "max_tokens": 1}
            answer = nginx.http.post(COMPLETIONS, json=body, headers={"x-request-id": name, **headers})
            assert answer.status_code == 200
            return nginx.answered(name)[-1]

        homes = {}
        # So many that none of the two is nobody's home.
        for session in range(40):
            asked = {who(f"session-{session}-{turn}", {"x-session-id": f"s{session}"}) for turn in range(3)}
            assert len(asked) == 1, f"session {session} went to {asked}"
            homes[session] = asked.pop()
        ports = {server.port for server in two}
        assert set(homes.values()) == ports
        assert {who(f"nobody-{turn}", {}) for turn in range(24)} == ports


def test_a_server_that_is_ended_under_load_loses_nothing(tmp_path, start):
    flags = ["--served-model-name", "sim", "--max-num-seqs", "4", "--max-model-len", "1024"]
    with start("sim:0.01", *flags) as one, start("sim:0.01", *flags) as two, Nginx(tmp_path, server_block(), [one, two]) as nginx:
        tokens, problems, done = 30, [], []
        stop = threading.Event()

        def client(number: int) -> None:
            kept = httpx.Client(base_url=nginx.url, timeout=120)
            while not stop.is_set():
                try:
                    body = {"model": "sim", "prompt": "Hi", "max_tokens": tokens, "ignore_eos": True}
                    if number % 2:
                        answer = kept.post(COMPLETIONS, json=body).raise_for_status()
                        assert answer.json()["usage"]["completion_tokens"] == tokens
                    else:
                        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
                        with kept.stream("POST", COMPLETIONS, json=asked) as answer:
                            answer.raise_for_status()
                            data = [line for line in answer.iter_lines() if line.startswith("data: ")]
                        assert data[-1] == "data: [DONE]"
                        usage = json.loads(data[-2].removeprefix("data: "))["usage"]
                        assert usage["completion_tokens"] == tokens
                    done.append(number)
                except Exception as problem:
                    problems.append(repr(problem))
                    return

        clients = [threading.Thread(target=client, args=(number,)) for number in range(12)]
        for thread in clients:
            thread.start()
        try:
            one.wait_for("requests at both", lambda: all(server.metric("plimsoll_requests_running") >= 2 for server in (one, two)))
            one.process.send_signal(signal.SIGTERM)
            assert one.process.wait(PATIENCE) == 0, one.tail()
            so_far = len(done)
            two.wait_for("the other's answers", lambda: problems or len(done) > so_far + 24)
        finally:
            stop.set()
            for thread in clients:
                thread.join(120)
        assert problems == []
