"""`--device` where there is no GPU: the same binary serves on the CPU and says so, and a GPU that is asked for is an error.

`make test-cuda` runs these on a binary with CUDA kernels.
"""

import os
import subprocess

import pytest
from conftest import BINARY, NO_PROFILE_CACHE, PATIENCE, ROOT, SMOLLM2

GPU_UNUSABLE = 7


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Hides the GPUs of a machine that has some."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def run(*args):
    environment = os.environ | NO_PROFILE_CACHE
    return subprocess.run([BINARY, *map(str, args)], capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT, env=environment)


def test_without_a_gpu_the_cpu_serves_and_the_log_says_why(start):
    with start(str(SMOLLM2), "--max-model-len", "256", "--max-num-seqs", "2") as server:
        (line,) = [line for line in server.log.read_text().splitlines() if "device: " in line]
        assert "device: cpu (no NVIDIA " in line, line
        model = server.openai.models.list().data[0].id
        answer = server.openai.completions.create(model=model, prompt="The capital of France is", max_tokens=1, temperature=0)
        assert answer.choices[0].text == " Paris"


def test_a_gpu_that_is_asked_for_is_there_or_an_error():
    for device in ["cuda", "cuda:3"]:
        done = run("serve", SMOLLM2, "--device", device, "--port", "0")
        assert done.returncode == GPU_UNUSABLE, done.stderr
        assert "NVIDIA driver" in done.stderr or "there is no GPU" in done.stderr, done.stderr


def test_flags_of_a_gpu_are_refused_on_a_cpu():
    for flags in [["--gpu-memory-utilization", "0.9"], ["--kv-cache-dtype", "bfloat16"]]:
        done = run("serve", SMOLLM2, *flags, "--port", "0")
        assert done.returncode == 2 and flags[0] in done.stderr, done.stderr
