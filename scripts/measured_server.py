"""Servers that benchmarks start, and chats with them."""

import contextlib
import json
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

# Seconds until a server must be ready.
PATIENCE = 400


def answer(url, body=None):
    """What a server says, to a GET or to a POST of JSON."""
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10 if body is None else 300) as response:
        return response.read().decode()


@contextlib.contextmanager
def server(command, path="/ready"):
    """Its URL, and the seconds until it was ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begun = time.monotonic()
    process = subprocess.Popen([*command, "--port", str(port)], stdout=sys.stderr, stderr=sys.stderr)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None or time.monotonic() > begun + PATIENCE:
                raise RuntimeError(f"{command[0]} is not ready after {time.monotonic() - begun:.0f} s; exit code {process.poll()}")
            try:
                answer(f"{url}{path}")
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.02)
        yield url, time.monotonic() - begun
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def chats(url, model, vocabulary, at_once=32, turns=10, prefix=1024, question=128, length=128):
    """Chats that begin with the same `prefix` tokens, each turn of which asks `question` new ones behind all that was said before.
    How much of what had been said was found in the prefix cache (of the prefix too, but for the first chat), and how long turns took."""

    def tokens(rng, count):
        # Below the special ones.
        return [rng.randrange(vocabulary // 2) for _ in range(count)]

    def chat(seed):
        rng, said, found, seconds = random.Random(seed), shared, [], []
        for _ in range(turns):
            prompt = said + tokens(rng, question)
            begin = time.monotonic()
            body = {"model": model, "prompt": prompt, "max_tokens": length, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
            reply = json.loads(answer(f"{url}/v1/completions", body))
            seconds.append(time.monotonic() - begin)
            details = reply["usage"].get("prompt_tokens_details") or {}
            found.append((len(said), details.get("cached_tokens") or 0))
            said = prompt + reply["choices"][0]["token_ids"]
        return found, seconds

    shared = tokens(random.Random(0), prefix)
    chat(1)
    begin = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        outcomes = list(pool.map(chat, range(2, at_once + 2)))
    elapsed = time.monotonic() - begin
    known = sum(known for found, _ in outcomes for known, _ in found)
    cached = sum(cached for found, _ in outcomes for _, cached in found)
    seconds = sorted(second for _, chat_seconds in outcomes for second in chat_seconds)
    return {"found in the prefix cache": cached / known, "turns/s": len(seconds) / elapsed, "median turn s": seconds[len(seconds) // 2],
            "p99 turn s": seconds[len(seconds) * 99 // 100]}
