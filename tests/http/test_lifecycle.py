"""The life of a server as an orchestrator sees it: start, readiness, steps that hang, drain, exit codes."""

import contextlib
import http.client
import itertools
import json
import re
import signal
import threading
import time

import conftest
import httpx2 as httpx
import pytest
from test_sim import CHAT, HELLO, error

# The proof of these takes a second or two: each of its steps takes a tenth of one.
SLOW_START = ["sim:0.1", "--max-model-len", "1024"]


def listening(child, port: int, log) -> http.client.HTTPConnection:
    """A connection to a server that was just started, as soon as there can be one."""
    end = time.monotonic() + conftest.PATIENCE
    while True:
        assert child.poll() is None and time.monotonic() < end, log.read_text()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=conftest.PATIENCE)
        with contextlib.suppress(ConnectionRefusedError):
            connection.connect()
            return connection
        time.sleep(0.005)


def begin(connection: http.client.HTTPConnection, path: str, body: dict | None = None) -> http.client.HTTPResponse:
    head = {"Content-Type": "application/json"} if body is not None else {}
    connection.request("GET" if body is None else "POST", path, json.dumps(body) if body is not None else None, head)
    return connection.getresponse()


def ask(connection: http.client.HTTPConnection, path: str, body: dict | None = None):
    response = begin(connection, path, body)
    return response, response.read()


def reports(child, connection: http.client.HTTPConnection, log):
    """What /ready answers, again and again, until the server is ready."""
    status = None
    while status != 200:
        assert child.poll() is None, log.read_text()
        response, text = ask(connection, "/ready")
        status = response.status
        yield response, json.loads(text)


def test_the_port_answers_from_the_first_moment_to_the_last(tmp_path):
    """One connection lives through the whole start; nothing is refused or dropped, and nothing is served early."""
    step = 0.4
    model, *flags = [f"sim:{step}", *SLOW_START[1:]]
    with conftest.process(tmp_path, model, *flags) as (child, port, log):
        connection = listening(child, port, log)
        kept = connection.sock
        seen, refused, page = [], [], b""
        for response, report in reports(child, connection, log):
            if response.status == 200:
                break
            assert (response.status, report["status"]) == (503, "starting"), report
            assert 1 <= int(response.headers["retry-after"]) <= 60
            seen.append(report)
            # A graph takes as long as a step, and few are to be missed: more than /ready would take too long.
            if report["phase"] == "capture":
                continue
            # A new connection each time, and the old one for the rest.
            fresh = http.client.HTTPConnection("127.0.0.1", port, timeout=conftest.PATIENCE)
            response, text = ask(fresh, CHAT, {"messages": HELLO, "max_tokens": 1})
            if response.status != 200:
                refused.append(json.loads(text)["error"])
            fresh.close()
            health, text = ask(connection, "/health")
            assert health.status == 200, text
            page = ask(connection, "/metrics")[1] if json.loads(text)["status"] == "starting" else page
        assert connection.sock is kept, "the connection outlived the start"
        assert report["status"] == "ready"
        assert ask(connection, CHAT, {"messages": HELLO, "max_tokens": 1})[0].status == 200
        connection.close()

        assert seen and refused and {refusal["code"] for refusal in refused} == {"starting"}
        assert "starting" in refused[0]["message"] and "/ready" in refused[0]["message"]
        assert all(set(report) == {"status", "phase", "detail", "percent", "elapsed_seconds", "estimated_seconds"} for report in seen)
        percents = [report["percent"] for report in seen]
        assert percents == sorted(percents) and 0 <= percents[0] < percents[-1] < 100, percents
        elapsed = [report["elapsed_seconds"] for report in seen]
        assert elapsed == sorted(elapsed)
        phases = list(dict.fromkeys(report["phase"] for report in seen))
        order = ["resolve", "download", "device", "weights", "probe", "rebuild", "capture", "validate", "engine"]
        assert phases == sorted(phases, key=order.index) and {"probe", "validate"} <= set(phases), phases
        assert any("worst step" in (report["detail"] or "") for report in seen)
        # The simulated device takes as long for each of its graphs as for a step: on a busy machine, a pause between two
        # reports may hide as many graphs as fit into it.
        captured = [report for report in seen if report["phase"] == "capture"]
        graphs = list(dict.fromkeys(report["detail"] for report in captured))
        names = [f"CUDA graph {at} of 4" for at in range(1, 5)]
        pairs = list(itertools.pairwise(seen))
        pairs = [pair for pair in pairs if "capture" in (pair[0]["phase"], pair[1]["phase"])] or pairs
        hidden = sum(int((b["elapsed_seconds"] - a["elapsed_seconds"]) / step) for a, b in pairs)
        assert graphs == [name for name in names if name in graphs] and len(graphs) >= len(names) - hidden, captured
        assert all((a["percent"] < b["percent"]) == (a["detail"] != b["detail"]) for a, b in itertools.pairwise(captured)), captured
        assert all(report["estimated_seconds"] is not None for report in captured)
        # Every step takes as long as any other, so half way through the estimate is good.
        validating = [report for report in seen if report["phase"] == "validate" and report["estimated_seconds"] is not None]
        total = seen[-1]["elapsed_seconds"]
        assert validating and abs(validating[0]["elapsed_seconds"] + validating[0]["estimated_seconds"] - total) < max(2, total)
        assert f'plimsoll_start_progress_ratio{{model_name="{model}",engine="0",phase="'.encode() in page
        child.send_signal(signal.SIGTERM)
        assert child.wait(conftest.PATIENCE) == 0


def test_a_second_start_knows_how_long_it_takes(tmp_path):
    """What the first start took is kept beside its plan."""
    firsts = []
    for _ in range(2):
        # Slow enough to be asked before the first probe ends: behind it there is an estimate.
        flags = ["sim:0.3", "--max-model-len", "1024", "--profile-cache-dir", str(tmp_path / "plans")]
        with cached(), conftest.process(tmp_path, *flags) as (child, port, log):
            connection = listening(child, port, log)
            reports = []
            while (answer := ask(connection, "/ready"))[0].status != 200:
                reports.append(json.loads(answer[1]))
            connection.close()
            phases = {report["phase"] for report in reports}
            loaded = [report for report in reports if report["phase"] not in ("resolve", "device")]
            firsts.append(("probe" in phases, loaded[0]["estimated_seconds"]))
            child.send_signal(signal.SIGTERM)
            assert child.wait(conftest.PATIENCE) == 0
    assert firsts[0] == (True, None)
    assert not firsts[1][0] and firsts[1][1] > 0


@contextlib.contextmanager
def cached():
    """Servers that keep what they measured."""
    switched_off = dict(conftest.NO_PROFILE_CACHE)
    conftest.NO_PROFILE_CACHE.clear()
    try:
        yield
    finally:
        conftest.NO_PROFILE_CACHE.update(switched_off)


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_start_at_once(tmp_path, sig, code):
    with conftest.process(tmp_path, "sim:5") as (child, port, log):
        connection = listening(child, port, log)
        assert ask(connection, "/ready")[0].status == 503
        began = time.monotonic()
        child.send_signal(sig)
        assert child.wait(conftest.PATIENCE) == code
        assert time.monotonic() - began < 30
        connection.close()
        last = log.read_text().strip().splitlines()[-1]
        assert last.startswith(f"error: stopped by {sig.name}") and "of the start, in phase" in last


def test_a_start_that_fails_has_its_code_though_the_port_answered(tmp_path):
    with conftest.process(tmp_path, "sim", "--device-memory", "1MiB") as (child, _, log):
        assert child.wait(conftest.PATIENCE) == 4, log.read_text()


def test_a_step_that_hangs_fails_readiness_within_seconds_and_ends_the_process(start):
    """Requests of the hanging step hear of it, streams and others, and so do those that wait."""
    flags = ["--max-num-seqs", "2", "--stall-timeout", "1", "--watchdog-timeout", "20"]
    # There is time for two to run before that step.
    with start("sim:0.05,hang=40", *flags, expected_code=11) as server:
        assert server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 4, "ignore_eos": True}).status_code == 200
        answers = []

        def request(stream: bool):
            body = {"messages": HELLO, "max_tokens": 200, "ignore_eos": True, "stream": stream}
            answers.append(server.http.post(CHAT, json=body))

        threads = [threading.Thread(target=request, args=(index == 0,)) for index in range(4)]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        server.wait_for("a stall", lambda: server.http.get("/ready").json()["status"] == "stalled", timeout=30)
        ready = server.http.get("/ready")
        assert ready.status_code == 503 and ready.json()["step_in_progress_seconds"] >= 1
        assert server.http.get("/health").status_code == 200, "the watchdog is the one to end it"
        assert server.metric("plimsoll_engine_stalled_seconds") > server.metric("plimsoll_engine_stall_timeout_seconds")
        assert server.process.wait(conftest.PATIENCE) == 11
        assert time.monotonic() - began < 64
        for thread in threads:
            thread.join(conftest.PATIENCE)
        assert len(answers) == 4
        failed = [answer for answer in answers if answer.status_code == 500]
        assert len(failed) == 3 and all("watchdog" in error(answer, 500)["message"] for answer in failed)
        [streamed] = [answer.text for answer in answers if answer.status_code == 200]
        assert "watchdog" in streamed and streamed.rstrip().endswith("data: [DONE]")
        log = server.log.read_text()
        [record] = [line for line in log.splitlines() if "watchdog: " in line and "activity=" in line]
        for field in ["activity=launch", "step=", "rows=2", "prefill_tokens=", "decode_tokens=", "running=", "waiting=", "reserved=", "--watchdog-timeout"]:
            assert field in record, record
        assert log.strip().splitlines()[-1].startswith("error: the watchdog ended the server")


def test_a_server_that_is_slow_and_moves_is_never_ended(start):
    """Each step is well below what is allowed, and the request takes twice as long."""
    with start("sim:0.2", "--max-model-len", "256", "--stall-timeout", "3", "--watchdog-timeout", "3") as server:
        statuses = set()
        done = threading.Event()

        def watch():
            while not done.wait(0.2):
                statuses.add(server.http.get("/ready").status_code)

        watcher = threading.Thread(target=watch)
        watcher.start()
        answer = server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 30, "ignore_eos": True})
        done.set()
        watcher.join()
        assert answer.json()["usage"]["completion_tokens"] == 30
        assert statuses == {200}


def test_bounds_follow_the_proof(start):
    with start("sim:0.02", "--max-model-len", "256", "--stall-timeout", "0.001") as server:
        assert server.metric("plimsoll_engine_stall_timeout_seconds") == 0.001
        log = server.log.read_text()
        assert "--stall-timeout is shorter than the slowest worst step" in log
        slowest, watchdog = map(float, re.search(r"slowest_proved=(\S+) .*watchdog_timeout=(\S+)", log).groups())
        # As far as the log's digits go.
        assert slowest >= 0.02 and abs(watchdog - max(120, 30 * slowest)) < 0.1


def asks_for(tokens: int) -> dict:
    """The body of a streamed chat."""
    return {"messages": HELLO, "max_tokens": tokens, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}


def told(response: http.client.HTTPResponse):
    """What a streamed chat is answered with: the status, and the tokens that came or when to try again."""
    text = response.read().decode()
    if response.status != 200:
        return response.status, response.headers["retry-after"]
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]", data[-1]
    return 200, json.loads(data[-2])["usage"]["completion_tokens"]


@pytest.mark.parametrize("how", ["signal", "request"])
def test_a_drain_under_load_drops_nothing(start, how):
    """Clients of two servers go to the other when one refuses: every request that was accepted ends whole."""
    flags = ["--max-num-seqs", "3", "--max-model-len", "1024", "--enable-admin-api"]
    with start("sim:0.01", *flags) as one, start("sim:0.01", *flags) as two:
        counts, problems = [], []
        leaves, stop = threading.Event(), threading.Event()

        def client(number: int):
            home = [one, two][number % 2]
            # Connections are kept: none may be reset under an answer.
            connections = {server: http.client.HTTPConnection("127.0.0.1", server.port, timeout=120) for server in (one, two)}
            while not stop.is_set():
                connection = connections[home]
                was_kept = connection.sock is not None
                try:
                    try:
                        response = begin(connection, CHAT, asks_for(30))
                    except ConnectionError as nobody:
                        # Nobody accepts it any more; or it comes so late on a kept connection that this is closed, without a
                        # byte of an answer. As every client does, it asks again: here, the other.
                        connection.close()
                        refused = isinstance(nobody, ConnectionRefusedError)
                        assert home is one and leaves.is_set() and (was_kept or refused), repr(nobody)
                        home = two
                        continue
                    status, value = told(response)
                    if status == 503:
                        assert value and int(value) >= 1, "a refusal says when to come again"
                        home = two
                        continue
                    assert (status, value) == (200, 30)
                    counts.append(home is one)
                except Exception as problem:
                    problems.append(repr(problem))
                    return

        # More than can run: some wait in the queue when the drain begins.
        clients = [threading.Thread(target=client, args=(number,)) for number in range(16)]
        for thread in clients:
            thread.start()
        one.wait_for("a queue", lambda: one.metric("plimsoll_requests_waiting") >= 3)
        before = sum(counts)
        leaves.set()
        if how == "signal":
            one.process.send_signal(signal.SIGTERM)
        else:
            answer = one.http.post("/admin/drain")
            assert answer.status_code == 202 and answer.headers["connection"] == "close"
            report = answer.json()
            assert report["status"] == "draining" and report["requests_in_flight"] >= 3 and report["timeout_seconds"] == 30

        def unready() -> bool:
            try:
                ready = one.http.get("/ready")
            except httpx.TransportError:
                return True  # the drain was quick
            return ready.status_code == 503 and ready.headers["connection"] == "close" and ready.json()["status"] == "draining"

        one.wait_for("unreadiness", unready)
        assert one.process.wait(conftest.PATIENCE) == 0, one.tail()
        at_the_end = len(counts)
        two.wait_for("the other's answers", lambda: len(counts) > at_the_end + 5)
        stop.set()
        for thread in clients:
            thread.join(120)
        assert not problems, problems
        assert sum(counts) >= before + 3, "what ran and waited was finished"


def test_who_asks_again_at_once_hears_of_the_drain(start):
    """On the connection of the last answer, which is closed a moment later."""
    step, tokens, moment = 0.02, 30, 0.3
    for _ in range(5):
        with start(f"sim:{step}", "--max-model-len", "1024", "--enable-admin-api") as server:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=conftest.PATIENCE)
            began = time.monotonic()
            response = begin(connection, CHAT, asks_for(tokens))
            in_flight = server.http.post("/admin/drain").json()["requests_in_flight"]
            assert response.read().rstrip().endswith(b"data: [DONE]")
            assert connection.sock is not None, "it is kept"
            refused = None
            try:
                refused, text = ask(connection, CHAT, asks_for(1))
            except ConnectionError:
                # A busy machine may have kept us until all was over, which then says nothing about the server.
                assert not in_flight or time.monotonic() - began > tokens * step + moment, "it is closed at once"
            assert server.process.wait(conftest.PATIENCE) == 0
        if refused:
            assert refused.status == 503 and json.loads(text)["error"]["code"] == "shutting_down"
            return
    pytest.fail("this machine is too busy to tell")


def test_a_second_signal_ends_a_drain_at_once(start):
    with start("sim:0.1", "--max-model-len", "1024", expected_code=143) as server:
        thread = threading.Thread(target=swallow, args=(server,))
        thread.start()
        server.wait_for("a running request", lambda: server.metric("plimsoll_requests_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("the drain", lambda: server.http.get("/ready").json()["status"] == "draining")
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(conftest.PATIENCE) == 143
        assert time.monotonic() - began < 20
        thread.join()


def test_a_drain_does_not_wait_for_a_step_that_hangs(start):
    flags = ["--watchdog-timeout", "10", "--drain-timeout", "10m"]
    with start("sim:hang=3", *flags, expected_code=11) as server:
        thread = threading.Thread(target=swallow, args=(server,))
        thread.start()
        hangs = lambda: (server.http.get("/ready").json()["step_in_progress_seconds"] or 0) > 0.5
        server.wait_for("the step that hangs", hangs)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(conftest.PATIENCE) == 11
        assert "watchdog: " in server.log.read_text() and 'phase="draining"' in server.log.read_text()
        thread.join()


def swallow(server) -> None:
    """A long stream whose end nobody minds."""
    with contextlib.suppress(OSError, http.client.HTTPException, AssertionError, KeyError):
        told(begin(http.client.HTTPConnection("127.0.0.1", server.port, timeout=120), CHAT, asks_for(900)))


def test_an_idle_server_drains_by_request_and_closes_idle_connections(start):
    with start("sim", "--enable-admin-api", "--api-key", "secret") as server:
        idle = http.client.HTTPConnection("127.0.0.1", server.port, timeout=conftest.PATIENCE)
        assert ask(idle, "/ready")[0].status == 200
        assert error(server.http.post("/admin/drain"), 401)["code"] == "invalid_api_key"
        key = {"authorization": "Bearer secret"}
        page = server.http.post("/admin/drain", headers={**key, "origin": "http://evil.example", "content-type": "text/plain"})
        assert error(page, 403)["code"] == "cross_origin"
        assert error(server.http.post("/admin/drain", headers=key, json={"timeout": 3}), 400)
        assert server.http.get("/ready").status_code == 200
        answer = server.http.post("/admin/drain", headers=key, json={})
        assert answer.status_code == 202 and answer.json()["requests_in_flight"] == 0
        assert server.process.wait(conftest.PATIENCE) == 0
        assert idle.sock.recv(1) == b"", "it is closed, and not reset"


def test_there_is_no_admin_endpoint_without_its_flag(sim):
    assert error(sim.http.post("/admin/drain"), 404)["code"] == "unknown_url"
