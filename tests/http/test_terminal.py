"""What people see of a start: a line for each phase, a bar while something is under way, details only where asked for."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time

import pytest
from conftest import BINARY, NO_PROFILE_CACHE, PATIENCE

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PHASES = ["starting", "device", "probe", "KV cache", "proof", "memory", "ready"]
SERVE = ["serve", "sim", "--served-model-name", "sim", "--port", "0", "--max-model-len", "256"]


def environment(tmp_path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PLIMSOLL_") and name not in ("RUST_LOG", "NO_COLOR")}
    return kept | NO_PROFILE_CACHE | {"PLIMSOLL_DEVICE_LOCK_DIR": str(tmp_path), "TERM": "xterm"} | variables


def on_terminal(tmp_path, *args: str, columns: int = 100, until: str | None = None, **variables: str) -> str:
    """What a command writes to a terminal until it ends, or until this text comes."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    command = [str(BINARY), *args]
    child = subprocess.Popen(command, stdout=follower, stderr=follower, stdin=subprocess.DEVNULL, env=environment(tmp_path, **variables))
    os.close(follower)
    text, end = b"", time.monotonic() + PATIENCE
    try:
        while until is None or not re.search(until, text.decode(errors="replace")):
            assert time.monotonic() < end, text
            if not select.select([leader], [], [], 1)[0]:
                continue
            try:
                more = os.read(leader, 65536)
            except OSError:  # Everybody has closed the other end.
                more = b""
            if not more:
                break
            text += more
    finally:
        child.terminate()
        child.wait()
        os.close(leader)
    return text.decode()


def lines(text: str) -> list[str]:
    """Lines without bars, which end with a return of the carriage."""
    return [line for part in text.split("\r\n") if (line := ESCAPE.sub("", part).split("\r")[-1].rstrip())]


def names(text: str) -> list[str]:
    return [line[:11].strip() for line in lines(text) if line[:11].strip()]


READY = r"API: \S+\r\n"


@pytest.mark.parametrize("columns", [100, 40])
def test_a_start_is_a_line_for_each_phase(tmp_path, columns):
    text = on_terminal(tmp_path, *SERVE, columns=columns, until=READY)
    *shown, last = lines(text)
    if columns == 40:
        last = f"{shown.pop()} - {last}"
    assert re.fullmatch(r"Chat: (http://127\.0\.0\.1:\d+) - API: \1/docs", last)
    assert [line[:11].strip() for line in shown if line[0] != " "] == PHASES, text
    assert "[" in text and "worst-case steps" in text
    for detail in ("INFO", "auto-profile", "curl", "0/0", "{"):
        assert detail not in text, text
    # What is drawn, bars as well, fits.
    for part in re.split(r"[\r\n]+", ESCAPE.sub("", text)):
        assert len(part) <= columns, part


def test_bars_show_what_is_under_way(tmp_path):
    # Steps that take so long that a bar is drawn.
    slow = ["serve", "sim:0.2", *SERVE[2:]]
    text = on_terminal(tmp_path, *slow, until=READY)
    assert re.search(r"probe      \[[=> ]+\] \d+/\d+ \w", text), text
    assert "\x1b[2K" in text or "\r" in text.replace("\r\n", "")
    narrow = on_terminal(tmp_path, *slow, columns=40, until=READY)
    assert re.search(r"probe      \[[=> ]{20}\] +\d+ %", narrow), narrow
    # A terminal that cannot move its cursor gets none.
    dumb = on_terminal(tmp_path, *slow, until=READY, TERM="dumb")
    assert "\x1b" not in dumb and "\r" not in dumb.replace("\r\n", "") and "[=" not in dumb
    assert names(dumb)[:-1] == PHASES


def test_details_are_for_those_who_ask(tmp_path):
    for flags, variables in [(["-v"], {}), ([], {"PLIMSOLL_VERBOSE": "1"}), (["--log-level", "info"], {}), ([], {"RUST_LOG": "info"})]:
        text = on_terminal(tmp_path, *SERVE, *flags, until=READY, **variables)
        for detail in ("auto-profile phase=validate", "timeouts of a step", "next start, ", "auto-profile ready total=", "curl http", "ready: sim after", "    total "):
            assert detail in text, (flags, detail, text)
        assert not set(names(text)) & {"proof", "KV cache", "memory"}
        assert COLOUR.search(text)
        assert lines(text)[-1].startswith("Chat: ")
    # As their convention has it, an empty variable is none.
    assert COLOUR.search(on_terminal(tmp_path, *SERVE, "-v", until=READY, NO_COLOR=""))
    assert not COLOUR.search(on_terminal(tmp_path, *SERVE, "-v", until=READY, NO_COLOR="1"))
    assert not ESCAPE.search(on_terminal(tmp_path, *SERVE, "-v", until=READY, TERM="dumb"))


def test_warnings_and_errors_are_always_shown(tmp_path):
    text = on_terminal(tmp_path, *SERVE, "--stall-timeout", "0.000001", until=READY)
    [warning] = [line for line in lines(text) if "WARN" in line]
    assert re.match(r"\d\d:\d\d:\d\dZ +WARN --stall-timeout is shorter", warning)
    text = on_terminal(tmp_path, *SERVE, "--device-memory", "1MiB")
    assert "error: " in text and "--device-memory=" in text


def test_a_plan_of_an_earlier_start_has_no_empty_bar(tmp_path):
    serve = [*SERVE, "--profile-cache", "--profile-cache-dir", str(tmp_path / "plans")]
    first = on_terminal(tmp_path, *serve, until=READY)
    second = on_terminal(tmp_path, *serve, until=READY)
    assert "measured in" in first and "measured by an earlier start" in second
    assert names(second)[:-1] == PHASES and "0/0" not in second


@pytest.mark.parametrize(
    "flags, last",
    [
        (["--root-path", "/llm"], r"Chat: (http://127\.0\.0\.1:\d+/llm) - API: \1/docs"),
        (["--host", "0.0.0.0"], r"Chat: (http://127\.0\.0\.1:\d+) - API: \1/docs"),
        (["--disable-ui"], r"API: http://127\.0\.0\.1:\d+/v1"),
        (["--runner", "pooling"], r"API: http://127\.0\.0\.1:\d+/docs"),
    ],
)
def test_the_last_line_has_the_addresses(tmp_path, flags, last):
    text = on_terminal(tmp_path, *SERVE, *flags, until=READY)
    assert re.fullmatch(last, lines(text)[-1]), text


def test_a_socket_has_no_address(tmp_path):
    path = tmp_path / "socket"
    text = on_terminal(tmp_path, *SERVE, "--uds", str(path), until=r"-d '.*'\r\n")
    assert f"curl --unix-socket {path} http://localhost/v1/chat/completions" in text and "Chat:" not in text


@pytest.mark.parametrize("command", ["profile", "plan"])
def test_files_get_plain_text(tmp_path, command):
    args = [str(BINARY), command, "sim", "--max-model-len", "256"]
    done = subprocess.run(args, capture_output=True, env=environment(tmp_path), timeout=PATIENCE, check=True)
    assert not {b"\x1b", b"\r"} & {bytes([byte]) for byte in done.stdout + done.stderr}
    assert b"  K kv " in done.stdout and max(map(len, done.stdout.splitlines())) > 80
    phases = [line[:11].strip() for line in done.stderr.decode().splitlines()]
    assert phases == {"plan": [], "profile": ["device", "probe", "KV cache", "proof"]}[command], done.stderr


@pytest.mark.parametrize("command", ["profile", "plan"])
def test_tables_fit_narrow_terminals(tmp_path, command):
    text = on_terminal(tmp_path, command, "sim", "--max-model-len", "256", columns=40)
    assert "K kv" in text and "requests of 256" in " ".join(text.split())
    for line in lines(text):
        # The command to serve is to be copied.
        assert len(line) <= 40 or " serve sim" in line, line
