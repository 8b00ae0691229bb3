"""A server under soak: started here, or attached to, and what its `/metrics` say."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

from wire import Closed, call

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("SERVER_BINARY", ROOT / "target/debug/plimsoll"))
# A debug build on a busy machine.
START_TIMEOUT = 240
STOP_TIMEOUT = 90
KEYS = ["neighbour", "crowd", "chaos", "flood", "mallory", "hauler"]


class Page:
    """A page of `/metrics`."""

    def __init__(self, text: str):
        self.values: dict[tuple[str, frozenset], float] = {}
        for line in text.splitlines():
            match = re.fullmatch(r"([a-z0-9_:]+)(?:\{(.*)\})? (\S+)", line)
            if match:
                labels = frozenset(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
                self.values[match[1], labels] = float(match[3])

    def sum(self, name: str, **labels: str) -> float:
        """Over all series of that name with these labels."""
        wanted = set(labels.items())
        return sum(value for (known, has), value in self.values.items() if known == name and wanted <= has)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of a label."""
        sums: dict[str, float] = {}
        for (known, has), value in self.values.items():
            if known == name and label in dict(has):
                sums[dict(has)[label]] = sums.get(dict(has)[label], 0) + value
        return sums


class Target:
    """One server."""

    def __init__(self, port: int, keys: dict, process: subprocess.Popen | None = None, log: Path | None = None):
        self.port, self.keys, self.process, self.log = port, keys, process, log

    async def page(self) -> Page:
        status, body, _ = await call(self.port, "GET", "/metrics")
        if status != 200:
            raise Closed(f"/metrics: {status}")
        return Page(body.decode())

    async def ready(self) -> bool:
        with contextlib.suppress(OSError, Closed):
            return (await call(self.port, "GET", "/ready"))[0] == 200
        return False

    async def version(self) -> str:
        """With the commit where it can be asked for."""
        if self.process:
            return subprocess.run([self.process.args[0], "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        return json.loads((await call(self.port, "GET", "/version", key=self.keys["crowd"]))[1])["version"]

    def ended(self) -> int | None:
        return self.process and self.process.poll()

    async def wait(self, what: str, condition, seconds: float) -> bool:
        """Whether `condition` came true in time."""
        end = time.monotonic() + seconds
        while not await condition():
            if self.ended() is not None or time.monotonic() > end:
                print(f"soak: {what} did not come", flush=True)
                return False
            await asyncio.sleep(0.2)
        return True

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log else ""

    async def stop(self) -> int:
        """Drains; the exit code, negative where it had to be killed."""
        self.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + STOP_TIMEOUT
        while self.process.poll() is None and time.monotonic() < end:
            await asyncio.sleep(0.1)
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.asynccontextmanager
async def start(directory: Path, name: str, *flags: str):
    """A server that is ready, from a copy of the binary that no build replaces; it is killed with the block."""
    binary = directory / "plimsoll"
    if not binary.exists():
        # The first backtrace in a library's error would read all of the debug information, and keep it: 130 MiB.
        subprocess.run(["strip", "--strip-debug", "-o", binary, BINARY], check=True)
    keys = directory / "keys"
    keys.write_text("".join(f"{key} soak-{key}\n" for key in KEYS))
    port, log = free_port(), directory / f"{name}.log"
    command = [str(binary), "serve", *flags, "--port", str(port), "--api-key-file", str(keys)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PLIMSOLL_")}
    environment |= {"PLIMSOLL_NO_PROFILE_CACHE": "true", "PLIMSOLL_DEVICE_LOCK_DIR": str(directory)}
    print("soak:", " ".join(["plimsoll", *command[1:]]), flush=True)
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    target = Target(port, {key: f"soak-{key}" for key in KEYS}, process, log)
    try:
        if not await target.wait("readiness", target.ready, START_TIMEOUT):
            raise SystemExit(f"soak: {name} does not start\n{target.log_text()[-4000:]}")
        yield target
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
