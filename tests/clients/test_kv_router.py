"""Dynamo's router, subscribed to our KV events: its decoder takes every one, and its index foretells what is cached."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HTTP, fixtures

sys.path.insert(0, str(HTTP))
from kv_events import BLOCK, Subscriber, config, wait_until_known  # noqa: E402

ROUTER = Path(__file__).resolve().parents[2] / ".cache/clients/target/debug/kv-router"


class Router:
    """The index, fed with what a subscriber hears."""

    def __init__(self, subscriber: Subscriber):
        self.subscriber = subscriber
        self.applied = -1
        self.process = subprocess.Popen([ROUTER, str(BLOCK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def say(self, line: str) -> int:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the router ended at {line[:200]}"
        return int(answer)

    def follow(self) -> None:
        self.subscriber.read()
        for sequence in range(self.applied + 1, self.subscriber.last + 1):
            assert self.say(f"batch {sequence} {self.subscriber.payloads[sequence].hex()}") > 0
        self.applied = self.subscriber.last

    def find(self, tokens: list[int], salt: str | None) -> int:
        return BLOCK * self.say(f"find {salt or '-'} {','.join(map(str, tokens))}")


def ask(server, tokens: list[int], salt: str | None) -> int:
    body = {"model": "sim", "prompt": tokens, "max_tokens": 20, "ignore_eos": True} | ({"cache_salt": salt} if salt else {})
    usage = server.http.post("/v1/completions", json=body).raise_for_status().json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("tokens", [65536, 1024], ids=["roomy", "pressed"])
def test_dynamos_router_foretells_what_is_found_in_the_cache(start, tokens):
    seed = random.randrange(2**32)
    print(f"{seed=}")
    rng = random.Random(seed)
    own_port, port, replay_port = fixtures.free_ports(3)
    flags = ["--kv-events-config", config(port, replay_port), "--block-size", str(BLOCK)]
    flags += ["--max-model-len", "512", "--max-total-token-num", str(tokens)]
    with start("sim", "--served-model-name", "sim", *flags, port=own_port) as server:
        subscriber = Subscriber(port, replay_port)
        router = Router(subscriber)
        words = lambda length: [rng.randrange(97, 123) for _ in range(length)]  # noqa: E731
        server.wait_for("an event", lambda: ask(server, words(2 * BLOCK + 1), None) is not None and subscriber.hears())
        beginnings = [words(length) for length in (BLOCK, 3 * BLOCK + 5, 10 * BLOCK)]
        found = 0
        for _ in range(60):
            prompt = rng.choice(beginnings) + words(rng.randrange(1, 5 * BLOCK))
            salt = rng.choice([None, None, "pepper"])

            wait_until_known(server, subscriber)
            router.follow()
            foretold = router.find(prompt[:-1], salt)
            assert ask(server, prompt, salt) == foretold
            found += foretold
        assert found > 0
        assert (subscriber.cache.removed > 0) == (tokens == 1024)
        router.process.stdin.close()
        assert router.process.wait(60) == 0
        subscriber.close()
