"""Starts `plimsoll serve` for the tests, which see nothing of it but HTTP, signals and its exit code."""

import atexit
import contextlib
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import httpx2 as httpx
import openai
import pytest

ROOT = Path(__file__).resolve().parents[2]


def own_binary() -> Path:
    """SERVER_BINARY, or a copy of what `make build` made, which all workers share: `scripts/release` moves the original away for a
    moment."""
    if "SERVER_BINARY" not in os.environ:
        built = ROOT / "target/debug/plimsoll"
        if not built.exists():
            return built
        directory = tempfile.mkdtemp(prefix="plimsoll-tests-")
        atexit.register(shutil.rmtree, directory)
        os.environ["SERVER_BINARY"] = shutil.copy(built, directory)
    return Path(os.environ["SERVER_BINARY"])


BINARY = own_binary()
SMOLLM2 = ROOT / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"
# Tests measure anew, and leave the user's cache alone.
NO_PROFILE_CACHE = {"PLIMSOLL_NO_PROFILE_CACHE": "true"}
# Seconds in which a debug build on a busy machine does whatever a test waits for. Only what hangs takes longer: every wait ends as soon
# as it may.
PATIENCE = 300


class Server:
    """One running server."""

    def __init__(self, process: subprocess.Popen, port: int, log: Path):
        self.process = process
        self.log = log
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        # No connection is used again about when a server with short timeouts closes it.
        limits = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=0.5)
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, limits=limits)
        # No retries: a 429 or a 503 is what some tests want to see.
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def metric(self, name: str, **labels: str) -> float:
        """Value of the one metric with this name that has these labels."""
        page = self.http.get("/metrics").raise_for_status().text
        found = []
        for line in page.splitlines():
            match = re.fullmatch(r"([a-z_:]+)(?:\{(.*)\})? (\S+)", line)
            if match and match[1] == name:
                has = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
                if labels.items() <= has.items():
                    found.append(float(match[3]))
        assert len(found) == 1, f"{name}{labels}: {found} in\n{page}"
        return found[0]

    def wait_for(self, what: str, condition, timeout: float = PATIENCE) -> None:
        """Returns once `condition()` is true."""
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"{what} did not happen within {timeout} s\n{self.tail()}"
            time.sleep(0.02)

    def wait_until_empty(self) -> None:
        """Returns once no request is in and none holds KV."""
        self.wait_for(
            "an empty engine",
            lambda: self.metric("plimsoll_requests_in_flight") == 0
            and self.metric("plimsoll_kv_blocks", state="used") == 0,
        )

    def tail(self) -> str:
        """The end of the log, for messages of failed tests."""
        return "--- server log ---\n" + "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])

    def stop(self, sig: int = signal.SIGTERM, timeout: float = PATIENCE) -> int:
        """Asks the server to end; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"the server did not end within {timeout} s of signal {sig}\n{self.tail()}")
        finally:
            self.http.close()
            self.openai.close()


# Sockets that are bound and do not listen: no other process gets their ports, but a server that sets SO_REUSEADDR, as ours does, can listen there.
PORTS: list[socket.socket] = []


def free_port() -> int:
    """A port for a server that does not listen yet."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    PORTS.append(held)
    return held.getsockname()[1]


def free_ports(count: int) -> list[int]:
    return [free_port() for _ in range(count)]


@contextlib.contextmanager
def process(directory: Path, *args: str, port: int | None = None):
    """A server that was just started: process, port and log. It ends with the block."""
    assert BINARY.exists(), f"{BINARY} does not exist: run `make test-http`, or set SERVER_BINARY"
    port = port or free_port()
    log = directory / f"server-{port}.log"
    command = [str(BINARY), "serve", *args, "--port", str(port)]
    # The server takes settings from PLIMSOLL_*: those of the caller's shell are not for the tests.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PLIMSOLL_")}
    # Tests look for details of the log, too.
    environment |= NO_PROFILE_CACHE | {"PLIMSOLL_LOG_FORMAT": "text", "PLIMSOLL_VERBOSE": "true"}
    # Servers outside these tests need not wait for ours, nor ours for them.
    environment["PLIMSOLL_DEVICE_LOCK_DIR"] = str(directory)
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
    try:
        yield child, port, log
    finally:
        child.kill()
        child.wait()


@contextlib.contextmanager
def serve(directory: Path, *args: str, expected_code: int = 0, port: int | None = None):
    """A server that is ready; it ends with the block, with `expected_code`."""
    with process(directory, *args, port=port) as (child, port, log):
        server = Server(child, port, log)
        try:
            end = time.monotonic() + PATIENCE
            while True:
                code = child.poll()
                assert code is None, f"{args} ended with {code} before it was ready\n{server.tail()}"
                assert time.monotonic() < end, f"{args} was not ready after {PATIENCE} s\n{server.tail()}"
                with contextlib.suppress(httpx.TransportError):
                    if server.http.get("/ready").status_code == 200:
                        break
                time.sleep(0.05)
            yield server
        except BaseException:
            print(server.tail())
            child.kill()
            server.stop()
            raise
        code = server.stop()
        assert code == expected_code, f"the server ended with {code}\n{server.tail()}"


# Files that take longest: begun last, they would run alone in the end.
LONGEST = ["test_release.py", "test_hostile.py", "test_schema.py", "test_selftest.py", "test_sim.py", "test_smollm2.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        return LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST)

    items.sort(key=turn)


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """Starts further servers, as a context manager."""
    directory = tmp_path_factory.mktemp("servers")
    return functools.partial(serve, directory)


@pytest.fixture(scope="session")
def sim(start):
    """A simulated model with room for everybody. Where a prompt holds `<say>text</say>`, it answers with that text."""
    with start("sim", "--max-model-len", "4096", "--served-model-name", "sim", "simulated") as server:
        yield server


@pytest.fixture(scope="module")
def agent(start):
    """A simulated model that reasons and calls tools."""
    with start(
        "sim", "--max-model-len", "4096", "--served-model-name", "sim", "--tool-call-parser", "hermes",
        "--reasoning-parser", "qwen3",
    ) as server:
        yield server


@pytest.fixture(scope="session")
def smollm2(start):
    """The default model."""
    if not SMOLLM2.exists():
        pytest.fail(f"{SMOLLM2} does not exist: run scripts/fetch-default-model")
    with start(str(SMOLLM2), "--served-model-name", "smollm2", "--max-model-len", "1024", "--max-num-seqs", "8") as server:
        yield server
