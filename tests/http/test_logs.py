"""The log: JSON off the terminal, every line of it whatever happens, and text for people on one."""

import json
import os
import pty
import subprocess
import time

import openai
import pytest
from conftest import BINARY, NO_PROFILE_CACHE
from test_sim import CHAT, HELLO


def parsed(text: str) -> list[dict]:
    """The lines of a log, each of which must be an object with what every line has."""
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert {"timestamp", "level", "target", "message"} <= line.keys(), line
        assert line["level"] in ("ERROR", "WARN", "INFO", "DEBUG", "TRACE")
        time.strptime(line["timestamp"].split(".")[0], "%Y-%m-%dT%H:%M:%S")
    return lines


def requests(server) -> list[dict]:
    lines = parsed(server.log.read_text())
    return [line for line in lines if line["target"] == "plimsoll::request"]


@pytest.fixture(scope="module")
def logging(start, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("alice secret-of-alice\n")
    # As if nobody had said how to log; what the log must never hold is said aloud.
    flags = ["--log-format", "auto", "--log-level", "info,plimsoll_engine=debug", "--api-key-file", str(keys)]
    with start("sim", "--served-model-name", "sim", *flags) as server:
        server.http.headers.update({"authorization": "Bearer secret-of-alice"})
        yield server
    lines = parsed(server.log.read_text())
    assert "secret-of-alice" not in server.log.read_text()
    # The last lines too, from signal to end.
    assert any("draining" in line["message"] for line in lines)


def test_a_start_is_lines_of_json(logging):
    # It says so a moment after it is.
    logging.wait_for("the last line of the start", lambda: '"message":"ready"' in logging.log.read_text())
    lines = parsed(logging.log.read_text())
    phases = [line["message"] for line in lines if "auto-profile phase=" in line["message"]]
    assert len(phases) >= 5
    [ready] = [line for line in lines if line["message"] == "ready"]
    assert ready["url"] == logging.url and ready["model"] == "sim"


def test_a_request_is_one_line_at_its_end(logging):
    prompt = [{"role": "user", "content": "Never-log-this-prompt <say>nor-this-answer</say>"}]
    body = {"messages": prompt, "max_tokens": 4, "ignore_eos": True}
    answer = logging.http.post(CHAT, json=body, headers={"x-request-id": "line-1"}).raise_for_status().json()
    logging.http.post(CHAT, json=body | {"stream": True}, headers={"x-request-id": "line-2"}).raise_for_status()
    assert logging.http.post(CHAT, json={"messages": HELLO, "max_tokens": -2}, headers={"x-request-id": "line-3"}).status_code == 400
    by_id = lambda name: [line for line in requests(logging) if line["id"] == name]
    logging.wait_for("the lines", lambda: all(by_id(f"line-{i}") for i in (1, 2, 3)))
    [line] = by_id("line-1")
    usage = answer["usage"]
    assert (line["model"], line["key"], line["status"], line["finish_reason"]) == ("sim", "alice", 200, "length")
    assert (line["prompt_tokens"], line["output_tokens"]) == (usage["prompt_tokens"], 4)
    assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 <= line["queue_seconds"] <= line["ttft_seconds"] <= line["total_seconds"] < 60
    assert len(by_id("line-2")) == 1 and by_id("line-2")[0]["complete"]
    [refused] = by_id("line-3")
    assert refused["status"] == 400 and "output_tokens" not in refused
    # Probes and scrapes are no lines.
    logging.http.get("/metrics").raise_for_status()
    assert {line["path"] for line in requests(logging)} == {CHAT}
    text = logging.log.read_text()
    assert "Never-log-this" not in text and "nor-this-answer" not in text


def test_lines_of_requests_are_sampled(start):
    flags = ["--served-model-name", "sim", "--log-format", "json", "--request-log-rate", "1"]
    with start("sim", *flags) as server:
        ask = lambda: server.openai.completions.create(model="sim", prompt="a", max_tokens=1)
        begin = time.monotonic()
        for _ in range(20):
            ask()
        took = time.monotonic() - begin
        assert len(requests(server)) <= took + 2
        server.wait_for("a line that counts the others", lambda: ask() and requests(server)[-1].get("skipped"))
        # The last line is about all before it.
        lines = requests(server)
        assert len(lines) + sum(line.get("skipped", 0) for line in lines) >= 20


@pytest.mark.parametrize("level, expected", [("warn", False), ("off,plimsoll::request=info", True), ("plimsoll::request=off", False)])
def test_levels_by_module(start, level, expected):
    with start("sim", "--served-model-name", "sim", "--log-format", "json", "--log-level", level) as server:
        server.openai.completions.create(model="sim", prompt="a", max_tokens=1)
        with pytest.raises(openai.BadRequestError):
            server.openai.completions.create(model="sim", prompt="a", max_tokens=0, n=0)
        if expected:
            server.wait_for("the lines", lambda: len(requests(server)) == 2)
    lines = parsed(server.log.read_text())
    assert any(line["target"] == "plimsoll::request" for line in lines) == expected
    assert any("auto-profile" in line["message"] for line in lines) == level.startswith("plimsoll")


@pytest.mark.parametrize(
    "flags, variables, code, expected",
    [
        (["./no/such/model"], {}, 3, "./no/such/model"),
        (["sim", "--no-such-flag"], {}, 2, "--no-such-flag"),
        (["sim", "--pipeline-parallel-size", "2"], {}, 2, "--device cuda:N"),
        (["sim", "--tensor-parallel-size", "2"], {}, 2, "--tensor-parallel-size"),
        (["sim"], {"PLIMSOLL_PROT": "1"}, 2, '"port"'),
        (["sim"], {"PLIMSOLL_LOG_LEVEL": "inof"}, 2, "PLIMSOLL_LOG_LEVEL"),
        (["sim", "--log-level", "info,plimsoll_engin=debug"], {}, 2, "plimsoll_engine"),
        (["sim"], {"RUST_LOG": "info,x=oops"}, 2, "RUST_LOG"),
        (["sim", "--device-memory", "1MiB"], {}, 4, "--device-memory"),
        (["sim", "--log-level", "off", "--max-total-token-num", "99999999"], {}, 4, "--max-total-token-num"),
    ],
)
def test_what_ends_a_start_is_a_line_like_the_others(tmp_path, flags, variables, code, expected):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PLIMSOLL_") and name != "RUST_LOG"}
    environment = kept | NO_PROFILE_CACHE | {"PLIMSOLL_DEVICE_LOCK_DIR": str(tmp_path)} | variables
    command = [str(BINARY), "serve", *flags, "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == code and done.stdout == "", done.stdout + done.stderr
    last = parsed(done.stderr)[-1]
    assert last["level"] == "ERROR" and expected in last["message"] and last["exit_code"] == code


def test_a_terminal_gets_text():
    leader, follower = pty.openpty()
    environment = os.environ | NO_PROFILE_CACHE
    command = [str(BINARY), "serve", "./no/such/model", "--port", "0"]
    child = subprocess.Popen(command, stdout=follower, stderr=follower, stdin=subprocess.DEVNULL, env=environment)
    os.close(follower)
    assert child.wait(60) == 3
    text = os.read(leader, 65536).decode()
    os.close(leader)
    assert "error: there is no ./no/such/model" in text and not text.startswith("{")


def test_commands_for_people_log_text_to_files_too():
    command = [str(BINARY), "profile", "sim", "--max-model-len", "256"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | NO_PROFILE_CACHE, timeout=120)
    assert done.returncode == 0 and done.stderr.startswith("device     ") and "{" not in done.stderr, done.stderr
