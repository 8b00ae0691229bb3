"""What README shows is true: its commands run, and print what it says; its metrics, files and commits exist.

A comment above a block says how it is tested: `not run: WHY`, `numbers differ` (from machine to machine), `log of the start`.
"""

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import threading
from typing import NamedTuple

import pytest
from conftest import BINARY, NO_PROFILE_CACHE, PATIENCE, ROOT, SMOLLM2, Server, free_port

README = (ROOT / "README.md").read_text()
MODEL = "SmolLM2-135M-Instruct"


class Block(NamedTuple):
    comment: str
    language: str
    text: str
    line: int


def blocks() -> list[Block]:
    found = []
    for match in re.finditer(r"(?:<!-- (?P<comment>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", README, re.M | re.S):
        line = README.count("\n", 0, match.start("language")) + 1
        found.append(Block(match["comment"] or "", match["language"], match["text"], line))
    return found


BLOCKS = blocks()
NOT_RUN = [block for block in BLOCKS if block.comment.startswith("not run: ")]


def of(language: str):
    chosen = [block for block in BLOCKS if block.language == language and block not in NOT_RUN]
    assert chosen, f"README has no {language} block that is run"
    return pytest.mark.parametrize("block", chosen, ids=lambda block: f"line-{block.line}")


def shape(line: str) -> str:
    """A line without what differs from machine to machine and run to run: numbers, units, times, and how far a bar goes."""
    line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)
    line = re.sub(r"\[[^\s\]]{40,}\]", "[bar]", line)
    line = re.sub(r"^[\d:.TZ-]+\s+(?=INFO|WARN|ERROR)", "", line)
    line = re.sub(r"\d+(\.\d+)?", "#", line)
    line = re.sub(r"# ?([KMGT]i)?B\b", "# B", line)
    return re.sub(r"\s+", " ", line).strip()


def assert_in_order(expected: list[str], said: list[str]):
    """Each expected line is among those said, after the one before it."""
    rest = iter(said)
    for line in expected:
        assert line in rest, f"README shows {line!r}, which is not (or not there) in\n" + "\n".join(said)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A directory in which the commands of README work: `plimsoll` is on PATH, and the models have the names that README gives them."""
    directory = tmp_path_factory.mktemp("readme")
    (directory / "bin").mkdir()
    (directory / "bin/plimsoll").symlink_to(BINARY)
    (directory / SMOLLM2.name).symlink_to(SMOLLM2)
    qwen = directory / "Qwen/Qwen3-8B"
    qwen.mkdir(parents=True)
    shutil.copy(ROOT / "crates/model/tests/configs/Qwen3-8B.json", qwen / "config.json")
    # curl fails where the server refuses.
    (directory / ".curlrc").write_text("fail\n")
    return directory


@pytest.fixture(scope="module")
def environment(directory):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PLIMSOLL_")}
    environment |= NO_PROFILE_CACHE | {"PLIMSOLL_DEVICE_LOCK_DIR": str(directory), "CURL_HOME": str(directory)}
    return environment | {"PATH": f"{directory / 'bin'}:{os.environ['PATH']}", "TERM": "xterm"}


@pytest.fixture(scope="module")
def served(directory, environment):
    """What `make serve` starts, on a terminal, with a smaller KV cache: the server, and the lines on the terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    port = free_port()
    command = [BINARY, "serve", str(SMOLLM2.relative_to(ROOT)), "--served-model-name", MODEL, "--generation-config", f"config/{MODEL}"]
    command += ["--port", str(port), "--max-model-len", "1024", "--max-num-seqs", "8"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
    os.close(theirs)
    log = directory / "terminal"

    def copy():
        with log.open("wb", buffering=0) as out:
            while True:
                try:
                    data = os.read(ours, 4096)
                except OSError:  # how Linux says that the last writer is gone
                    return
                out.write(data)

    reader = threading.Thread(target=copy)
    reader.start()
    server = Server(process, port, log)
    lines = lambda: re.split(r"[\r\n]+", log.read_text(errors="replace"))
    try:
        server.wait_for("ready", lambda: process.poll() is not None or any("Chat: " in line for line in lines()), timeout=PATIENCE)
        assert process.poll() is None, server.tail()
        yield server, lines
        assert server.stop() == 0
    finally:
        process.kill()
        process.wait()
        reader.join()
        os.close(ours)


def run(words, block, served, directory, environment):
    """What a command of README prints, against the server that the tests started."""
    text = block.text.replace("127.0.0.1:8000", f"127.0.0.1:{served[0].port}")
    return subprocess.run([*words, text], cwd=directory, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def test_every_block_is_tested_or_says_why_not():
    assert all(block.language in ("sh", "console", "python", "text") for block in BLOCKS), [block.language for block in BLOCKS]
    assert README.count("```") == 2 * len(BLOCKS)
    assert all(len(block.comment) > len("not run: ") for block in NOT_RUN)


@of("sh")
def test_commands(block, served, directory, environment):
    done = run(["bash", "-euc"], block, served, directory, environment)
    assert done.returncode == 0 and done.stdout, done.stdout + done.stderr


@of("python")
def test_python(block, served, directory, environment):
    done = run([sys.executable, "-c"], block, served, directory, environment)
    [expected] = [BLOCKS[index + 1] for index, each in enumerate(BLOCKS) if each == block]
    assert (done.returncode, done.stdout.strip()) == (0, expected.text.strip()), done.stdout + done.stderr


@of("console")
def test_commands_and_what_they_print(block, directory, environment):
    command, expected = re.fullmatch(r"\$ ([^\n]*)\n(.*)", block.text, re.S).groups()
    done = subprocess.run(["bash", "-c", command], cwd=directory, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode == 0) != expected.startswith("error: "), done.stderr
    form = shape if block.comment == "numbers differ" else str
    said = [form(line) for line in (done.stdout + done.stderr).splitlines()]
    assert_in_order([form(line) for line in expected.splitlines()], said)


def test_the_log_of_the_start(served):
    [block] = [block for block in BLOCKS if block.comment.startswith("log of the start")]
    assert_in_order([shape(line) for line in block.text.splitlines()], [shape(line) for line in served[1]()])


def test_metrics_exist(served):
    page = served[0].http.get("/metrics").text
    for name in re.findall(r"`((?:plimsoll|vllm)[_:][a-z_:]+)", README):
        assert f"# TYPE {name} " in page, name


def test_files_and_commits_exist():
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    # An archive has no history, and a shallow clone only a part of it.
    if shallow.stdout.strip() == "false":
        for commit in re.findall(r"`([0-9a-f]{7,40})`", README):
            told = subprocess.run(["git", "cat-file", "-t", commit], cwd=ROOT, capture_output=True, text=True)
            assert told.stdout.strip() == "commit", commit
