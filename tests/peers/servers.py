"""The servers that vLLM's tests start: our binary with the flags of a test, kept for the next test that wants the same."""

import contextlib
import functools
import importlib.util
import json
import re
import subprocess
import tempfile
from pathlib import Path

import scripts
import tokenizer

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("http_fixtures", ROOT / "tests/http/conftest.py")
fixtures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fixtures)
BINARY = fixtures.BINARY

# Flags of vLLM without which a test means the same, with the number of their values (`ANY`: up to the next flag). One that our
# server knows is passed on.
ANY = -1
DROPPED = {
    # How it computes, on what, and what it logs.
    "--attention-backend": 1,
    "--disable-frontend-multiprocessing": 0,
    "--disable-log-requests": 0,
    "--disable-log-stats": 0,
    "--disable-uvicorn-access-log": 0,
    "--distributed-executor-backend": 1,
    "--enable-chunked-prefill": 0,
    "--enable-prompt-tokens-details": 0,
    "--guided-decoding-backend": 1,
    "--ignore-patterns": 1,
    "--num-scheduler-steps": 1,
    "--structured-outputs-config.backend": 1,
    "--trust-remote-code": 0,
    # Adapters, which some files load for all of their tests.
    "--enable-lora": 0,
    "--lora-modules": ANY,
    "--max-lora-rank": 1,
    "--max-loras": 1,
    "--max-cpu-loras": 1,
    "--enable-prompt-adapter": 0,
    "--prompt-adapters": ANY,
    "--max-prompt-adapters": 1,
    "--max-prompt-adapter-token": 1,
    # Old names, and switches of what is always on here.
    "--task": 1,
    "--chat-template-content-format": 1,
    "--config-format": 1,
    "--enable-per-request-metrics": 0,
    "--enable-request-id-headers": 0,
    "--enable-tokenizer-info-endpoint": 0,
    "--max-logprobs": 1,
    "--no-async-scheduling": 0,
    "--reasoning-config": 1,
    "--show-hidden-metrics-for-version": 1,
    "--tokenizer-mode": 1,
}
# Those that are ours to choose: less makes a start faster, and the models here have no parts to spread.
REPLACED = {
    "--dtype": 1,
    "--gpu-memory-utilization": 1,
    "--load-format": 1,
    "--max-num-seqs": 1,
    "--tensor-parallel-size": 1,
    "-tp": 1,
}
# What a file of tests is run with. The KV cache is large enough for every test, and small enough to start fast.
LIMITS = ("--max-total-token-num", "16384", "--max-num-seqs", "16", "--max-num-batched-tokens", "512")
MODELS = {
    "sim": ("sim",),
    # Calls tools as a model would that was trained to: see `scripts.py`.
    "scripted": ("sim",),
    "sim-embeddings": ("sim", "--runner", "pooling"),
    "smollm2": ("{smollm2}", *LIMITS),
}
# Servers of one worker at one time.
KEPT = 2

kept = {}
stack = contextlib.ExitStack()
# The model of the file that runs; `plugin` sets it.
model = "sim"


class Refused(Exception):
    """The server did not start with the flags of the test."""


@functools.cache
def known_flags():
    told = subprocess.run([BINARY, "serve", "--help"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"--[a-z0-9-]+", told))


def adapted(arguments):
    """The flags without those that mean nothing here."""
    dropped = {flag: count for flag, count in DROPPED.items() if flag not in known_flags()} | REPLACED
    result, left = [], 0
    for argument in arguments:
        flag, _, value = argument.replace("_", "-").partition("=") if argument.startswith("-") else ("", "", "")
        if not flag and left:
            left -= 1
            continue
        left = 0
        if flag in dropped:
            left = 0 if value else {ANY: len(arguments)}.get(dropped[flag], dropped[flag])
            continue
        result.append(argument)
    return result


def start(name, arguments, overrides=None):
    """A server that answers to `name`, with these flags."""
    arguments = adapted(arguments)
    if model == "scripted":
        arguments = scripts.arguments(arguments)
    if overrides:
        arguments += ["--hf-overrides", json.dumps(overrides)]
    if "--served-model-name" not in arguments:
        arguments += ["--served-model-name", name]
    # As vLLM's class does.
    if "--seed" not in arguments:
        arguments += ["--seed", "0"]
    # The simulated model starts at once, and some tests read counters from zero.
    key = (model, *arguments) if model == "smollm2" else object()
    if key in kept and kept[key].server.process.poll() is not None:
        kept.pop(key).close()
    if key not in kept:
        while len(kept) >= KEPT:
            kept.pop(next(iter(kept))).close()
        own = contextlib.ExitStack()
        directory = Path(own.enter_context(tempfile.TemporaryDirectory()))
        words = [word.format(smollm2=fixtures.SMOLLM2) for word in MODELS[model]]
        try:
            server = own.enter_context(fixtures.serve(directory, *words, *arguments))
        except AssertionError as error:
            raise Refused(str(error)) from None
        kept[key] = own
        own.server = server
    return kept[key].server


@functools.cache
def scratch():
    """A directory for files that tests make."""
    return stack.enter_context(tempfile.TemporaryDirectory())


def close():
    while kept:
        kept.popitem()[1].close()
    stack.close()


@functools.cache
def smollm2_tokenizer():
    return tokenizer.Gguf(fixtures.SMOLLM2)


def model_tokenizer():
    """That of the model that runs, made without our code."""
    return tokenizer.Bytes() if model.startswith("sim") else smollm2_tokenizer()
