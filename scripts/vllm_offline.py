"""vLLM without a server, as the benchmarks of one GPU run it."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
from pathlib import Path


class Offline:
    """Runs workloads one after the other, each in a process of its own. The process of the next one is started ahead, imports vLLM and waits
    for its workload: importing takes half a minute, in which the GPU measures something else."""

    def __init__(self, venv, log, workloads):
        """`venv` is a shell file that puts a python3 with vLLM on PATH; `log`, an open file, gets what vLLM prints; so many workloads are to come."""
        self.venv, self.log, self.left, self.waiting = venv, log, workloads, None
        self.prepare()

    def prepare(self):
        """Starts the process of the next workload, if one is to come."""
        self.left -= 1
        self.waiting = self.start() if self.left >= 0 else None

    def start(self):
        command = [f'. {shlex.quote(str(self.venv))} && exec python3 "$@"', "python3", str(Path(__file__).with_name("bench-h200-vllm"))]
        return subprocess.Popen(["bash", "-c", *command], stdin=subprocess.PIPE, stdout=self.log, stderr=self.log, text=True,
                                start_new_session=True)

    def lines(self, job, timeout=None):
        """What `bench-h200-vllm` writes of a workload. RuntimeError if it fails, TimeoutError after so many seconds."""
        process = self.waiting or self.start()
        self.prepare()
        with tempfile.NamedTemporaryFile() as file:
            try:
                process.communicate(json.dumps(job | {"output": file.name}), timeout)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"vLLM is not done after {timeout:.0f} s: {job}") from None
            finally:
                end(process)
            if process.returncode != 0:
                raise RuntimeError(f"vLLM ended with {process.returncode}: {job}")
            return json.loads(file.read())

    def close(self):
        if self.waiting:
            end(self.waiting)


def end(process):
    """Ends a process and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
