"""`plimsoll chat`: on a terminal, in a pipe, with a running server and with one of its own."""

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import termios
import threading
import time

import conftest
import pytest
from conftest import BINARY, NO_PROFILE_CACHE, PATIENCE, SMOLLM2, free_port

SGR = re.compile(r"\x1b\[[0-9;]*m")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")
BOLD, DIM = "\x1b[1m", "\x1b[2m"
# The line editor has read a line.
PASTE_OFF = "\x1b[?2004l"


@pytest.fixture
def environment(tmp_path):
    """Without the settings and keys of the caller's shell."""
    mine = lambda name: not name.startswith("PLIMSOLL_") and name not in ("OPENAI_API_KEY", "NO_COLOR")
    environment = {name: value for name, value in os.environ.items() if mine(name)}
    environment |= NO_PROFILE_CACHE | {"PLIMSOLL_DEVICE_LOCK_DIR": str(tmp_path), "TERM": "xterm-256color"}
    return environment | {"XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": str(tmp_path)}


class Terminal:
    """A program on a terminal of 100 columns and 40 rows."""

    def __init__(self, environment, *args: str):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        # The terminal is the session's, as a shell would have it: it can hang up.
        self.child = subprocess.Popen([BINARY, "chat", *args], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
                                      preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(theirs)
        self.ours = ours
        self.output = ""
        self.seen = 0
        self.closing = threading.Event()
        self.reader = threading.Thread(target=self.copy)
        self.reader.start()

    def copy(self):
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while not self.closing.is_set():
            if not select.select([self.ours], [], [], 0.05)[0]:
                continue
            try:
                data = os.read(self.ours, 4096)
            except OSError:  # how Linux says that the last writer is gone
                return
            self.output += decoder.decode(data)

    def hang_up(self) -> None:
        """Takes the terminal away."""
        if not self.closing.is_set():
            self.closing.set()
            self.reader.join()
            os.close(self.ours)

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def wait(self, text: str) -> str:
        """What came after the text before, up to this one."""
        end = time.monotonic() + PATIENCE
        while (at := self.output.find(text, self.seen)) < 0:
            code = self.child.poll()
            assert code is None and time.monotonic() < end, f"no {text!r} ({code}) in\n{self.output[self.seen:]!r}"
            time.sleep(0.02)
        part, self.seen = self.output[self.seen : at + len(text)], at + len(text)
        return part

    def prompt(self) -> str:
        return self.wait(">>> ")

    def ask(self, text: str) -> str:
        """Types a line; what came until the next prompt."""
        self.type(text + "\r")
        # The line itself, as it was typed.
        self.wait(PASTE_OFF)
        return self.prompt()

    def end(self, keys: str = "\x04") -> int:
        self.type(keys)
        return self.child.wait(PATIENCE)


@contextlib.contextmanager
def terminal(environment, *args: str):
    opened = Terminal(environment, *args)
    try:
        yield opened
    finally:
        opened.child.kill()
        opened.child.wait()
        opened.hang_up()


def piped(environment, text: str, *args: str) -> subprocess.CompletedProcess:
    return subprocess.run([BINARY, "chat", *args], input=text, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def plain(text: str) -> str:
    return ESCAPE.sub("", text).replace("\r", "")


# --- on a terminal


def test_a_chat_on_a_terminal(sim, environment, tmp_path):
    with terminal(environment, "--url", sim.url, "--temperature", "0") as chat:
        greeting = plain(chat.prompt())
        assert "sim at" in greeting and "/help" in greeting
        answer = chat.ask("<say># Title and **bold** `code`</say>")
        assert f"{BOLD}" in answer and "**" not in plain(answer).split("Title")[-1], answer
        assert re.search(r"\d+ tokens, .*first after [\d.]+ s", plain(answer)), answer
        assert "/system TEXT" in plain(chat.ask("/help"))
        assert "set the system prompt" in plain(chat.ask("/system Be brief."))
        assert "Be brief." in plain(chat.ask("/system"))
        assert "/help lists" in plain(chat.ask("/nonsense"))
        saved = tmp_path / "chat.md"
        assert "wrote 3 messages" in plain(chat.ask(f"/save {saved}"))
        assert "forgot" in plain(chat.ask("/clear"))
        assert chat.end() == 0
    text = saved.read_text()
    assert text.startswith("## System\n\nBe brief.\n\n## User\n\n<say># Title") and "## Assistant\n\n# Title and **bold** `code`" in text
    # The next chat knows what was typed: the key up.
    assert (tmp_path / "state/plimsoll/chat_history").stat().st_mode & 0o077 == 0
    with terminal(environment, "--url", sim.url) as chat:
        chat.prompt()
        chat.type("\x1b[A\x1b[A")
        chat.wait("/save ")
        chat.type("\x03")
        assert "Ctrl-D" in plain(chat.prompt())
        assert chat.end("/exit\r") == 0


def test_a_history_that_cannot_be_written_is_said_once(sim, environment, tmp_path):
    with terminal(environment, "--url", sim.url, "--max-tokens", "4") as chat:
        assert "no history" not in plain(chat.prompt())
        directory = tmp_path / "state/plimsoll"
        shutil.rmtree(directory)
        directory.write_text("no directory")
        assert f"no history is kept: {directory}/chat_history: " in plain(chat.ask("One"))
        assert "no history" not in plain(chat.ask("Two"))
        assert chat.end() == 0


def test_markdown_is_drawn_while_it_comes(start, environment):
    with start("sim:0.01", "--max-model-len", "4096", "--served-model-name", "sim") as server, terminal(environment, "--url", server.url) as chat:
        chat.prompt()
        lines = ["# Sizes", "", "|name|bytes|", "|-|-:|", "|a|10|", "|bcd|2|", "", "- one", "- two **bold**", "", "```", "x = 1", "```", "end"]
        # One line is one message: the newlines are in quotes.
        answer = chat.ask('"""<say>' + "\r".join(lines) + '</say>"""')
        while "end" not in plain(answer):
            answer += chat.prompt()
        shown = [line.rstrip() for line in final_lines(answer)]
        for line in ["Sizes", "name  bytes", "a        10", "bcd       2", "• one", "• two bold", "  x = 1", "end"]:
            assert line in shown, shown
        assert chat.end() == 0


def final_lines(text: str) -> list[str]:
    """The lines that are on the terminal in the end."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b.|.", text, re.S):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines.extend([""] * (row + 1 - len(lines)))
        elif match := re.fullmatch(r"\x1b\[([0-9;?]*)([A-Za-z])", part):
            count = int(match[1]) if match[1].isdigit() else 1
            if match[2] == "A":
                row = max(row - count, 0)
            elif match[2] == "B":
                row += count
                lines.extend([""] * (row + 1 - len(lines)))
            elif match[2] == "C":
                column += count
            elif match[2] in "JK":
                lines[row] = lines[row][:column]
                if match[2] == "J":
                    del lines[row + 1 :]
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + 1 :]
            column += 1
    return lines


def test_reasoning_is_dimmed(start, environment):
    with start("sim", "--max-model-len", "2048", "--reasoning-parser", "qwen3", "--served-model-name", "sim") as server:
        with terminal(environment, "--url", server.url) as chat:
            chat.prompt()
            answer = chat.ask("<say><think>one two</think>four</say>")
            assert re.search(re.escape(DIM) + r"one two", answer) and "<think>" not in answer.split("\n", 1)[-1]
            assert not re.search(re.escape(DIM) + r"four", answer)
            assert chat.end() == 0
        # In a pipe it is no part of the answer.
        done = piped(environment, "<say><think>one two</think>four</say>", "--url", server.url)
        assert (done.returncode, done.stdout.strip()) == (0, "four"), done


def test_a_hostile_answer_does_not_reach_the_terminal(sim, environment):
    with terminal(environment, "--url", sim.url) as chat:
        chat.prompt()
        # Quoted, that the line editor does not obey it either.
        answer = chat.ask("<say>a\x16\x1b]0;title\x16\x07b</say>")
        assert "\x1b]0;" not in answer, answer
        assert chat.end() == 0


@contextlib.contextmanager
def long_answer(start, environment):
    """A server, and a chat in the midst of an answer of it."""
    with start("sim:0.05", "--max-model-len", "4096", "--served-model-name", "sim") as server, terminal(environment, "--url", server.url) as chat:
        chat.prompt()
        chat.type(f"<say>{'word ' * 400}</say>\r")
        # The line is taken: what comes now is the answer, not the line as it was typed.
        chat.wait(PASTE_OFF)
        chat.wait("word word")
        yield server, chat


def test_ctrl_c_stops_an_answer_and_not_the_chat(start, environment):
    with long_answer(start, environment) as (server, chat):
        chat.type("\x03")
        chat.wait("stopped")
        chat.prompt()
        server.wait_until_empty()
        assert "first after" in plain(chat.ask("<say>still here</say>"))
        assert chat.end() == 0


def test_keys_typed_during_an_answer_wait_for_the_prompt(start, environment):
    with long_answer(start, environment) as (_, chat):
        assert not termios.tcgetattr(chat.ours)[3] & (termios.ICANON | termios.ECHO), "the terminal neither echoes nor edits"
        chat.type("<say>typed ahead</say>\r")
        chat.type("\x03\x04")
        answer = chat.wait("stopped")
        assert "typed ahead" not in answer, answer
        assert "typed ahead" in plain(chat.wait("first after"))
        # Ctrl-D was the key after that.
        assert chat.child.wait(PATIENCE) == 0


@pytest.mark.parametrize("setting", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_plain_text_for_who_wants_it(sim, environment, setting):
    with terminal(environment | setting, "--url", sim.url) as chat:
        chat.prompt()
        chat.type("<say>**bold**</say>\r")
        chat.wait("first after")
        assert "\n**bold**" in plain(chat.output)
        assert not SGR.search(chat.output), chat.output
        if setting.get("TERM") == "dumb":
            assert "\x1b" not in chat.output, chat.output
        assert chat.end() == 0


# --- in a pipe


def test_one_question_in_a_pipe(sim, environment):
    done = piped(environment, "<say>two\nlines</say>\n", "--url", sim.url, "--temperature", "0", "--seed", "1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "two\nlines\n", "")
    done = piped(environment, "<say>one two three four</say>", "--url", sim.url, "--max-tokens", "3")
    assert done.returncode == 0 and len(done.stdout) < 10 and "--max-tokens" in done.stderr, done
    for text, args, code, part in [
        (" \n", [], 2, "is empty"),
        ("x", ["--temperature", "-3"], 1, "temperature"),
        ("x", ["--temperature=-3"], 1, "temperature"),
    ]:
        done = piped(environment, text, "--url", sim.url, *args)
        assert done.returncode == code and part in done.stderr, done


def test_a_question_is_ended_by_signals(start, environment):
    with start("sim:0.05", "--max-model-len", "4096") as server:
        for sig, code in [(signal.SIGINT, 130), (signal.SIGTERM, 143)]:
            child = subprocess.Popen([BINARY, "chat", "--url", server.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            child.stdin.write(f"<say>{'word ' * 400}</say>".encode())
            child.stdin.close()
            assert child.stdout.read(4) == b"word"
            child.send_signal(sig)
            assert child.wait(PATIENCE) == code
            server.wait_until_empty()


# --- servers


def test_which_server(sim, start, environment):
    done = piped(environment, "<say>hi</say>", "simulated", "--url", f"{sim.url}/v1")
    assert (done.returncode, done.stdout) == (0, "hi\n"), done
    done = piped(environment, "x", "acme/other", "--url", sim.url)
    assert done.returncode == 2 and "serves sim, not acme/other" in done.stderr and "--own-server" in done.stderr, done
    done = piped(environment, "x", "--url", sim.url, "--", "--max-num-seqs", "1")
    assert done.returncode == 2 and "flags after --" in done.stderr and sim.url in done.stderr, done
    nobody = f"http://127.0.0.1:{free_port()}"
    done = piped(environment, "x", "--url", nobody)
    assert done.returncode == 9 and f"no server answers at {nobody}" in done.stderr, done
    with start("sim", "--api-key", "secret") as server:
        done = piped(environment, "x", "--url", server.url)
        assert done.returncode == 9 and "OPENAI_API_KEY" in done.stderr, done
        for args, more in [(["--api-key", "secret"], {}), ([], {"OPENAI_API_KEY": "secret"})]:
            done = piped(environment | more, "<say>hi</say>", "--url", server.url, *args)
            assert (done.returncode, done.stdout) == (0, "hi\n"), done


def test_a_server_that_starts_is_waited_for(tmp_path, environment):
    # Its start takes longer than that of the chat, also where the machine is busy.
    with conftest.process(tmp_path, "sim:0.5", "--max-model-len", "1024") as (child, port, log):
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + PATIENCE
        while "progress:" not in log.read_text():
            assert time.monotonic() < end and child.poll() is None, log.read_text()
            time.sleep(0.01)
        with terminal(environment, "--url", url) as chat:
            try:
                shown = chat.prompt()
            except AssertionError:
                print(child.poll(), log.read_text())
                raise
            assert "starting" in shown and "%" in shown, shown
            assert "sim:0.5 at" in plain(shown)
            assert chat.end() == 0
        child.terminate()
        assert child.wait(PATIENCE) == 0


def test_a_server_of_its_own(environment, tmp_path):
    done = piped(environment, "<say>hi</say>", "sim", "--own-server", "--", "--max-model-len", "512")
    assert (done.returncode, done.stdout) == (0, "hi\n"), done
    assert not list(tmp_path.glob("plimsoll-chat-*")), "its socket and log are gone"
    done = piped(environment, "x", "sim", "--own-server", "--", "--max-num-batched-tokens", "0")
    assert done.returncode == 2 and "--max-num-batched-tokens" in done.stderr, done
    # Its advice is for the chat.
    done = piped(environment, "x", str(SMOLLM2), "--own-server", "--", "--device", "cpu", "--device-memory", "96MiB")
    assert done.returncode == 4 and f"chat {SMOLLM2} --own-server -- --max-num-seqs=1" in done.stderr and "--uds" not in done.stderr, done
    done = piped(environment, "x", "no/such/model", "--own-server")
    assert done.returncode == 3 and "there is no no/such/model" in done.stderr, done


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


@pytest.mark.parametrize("how", ["Ctrl-D", signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, "hang up"])
def test_its_own_server_ends_with_it(environment, how):
    with terminal(environment, "sim:0.01", "--own-server", "--", "--max-model-len", "512") as chat:
        chat.wait("ends")
        chat.prompt()
        before = termios.tcgetattr(chat.ours)
        pids = [pid for task in os.listdir(f"/proc/{chat.child.pid}/task") for pid in task_children(chat.child.pid, task)]
        assert len(pids) == 1 and is_running(pids[0]), pids
        expected = None
        if how == "Ctrl-D":
            chat.type("\x04")
            expected = 0
        elif how == "hang up":
            chat.hang_up()
        else:
            chat.child.send_signal(how)
            expected = -how if how == signal.SIGKILL else 128 + how
        code = chat.child.wait(PATIENCE)
        assert expected is None or code == expected, chat.output
        end = time.monotonic() + PATIENCE
        while is_running(pids[0]):
            assert time.monotonic() < end, "the server outlives the chat"
            time.sleep(0.05)
        if how == signal.SIGTERM:
            after = termios.tcgetattr(chat.ours)
            assert after[3] & termios.ECHO and after[3] & termios.ICANON and not before[3] & termios.ICANON, "the terminal is as it was"


def task_children(pid: int, task: str) -> list[int]:
    with open(f"/proc/{pid}/task/{task}/children") as file:
        return [int(child) for child in file.read().split()]
