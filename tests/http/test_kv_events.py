"""KV events for the routers of llm-d and Dynamo: what a subscriber believes is what the server reports and shares."""

import contextlib
import random
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest
import zmq
from conftest import free_ports, process
from kv_events import BLOCK, Subscriber, config, wait_until_known
from test_sim import COMPLETIONS


@contextlib.contextmanager
def serving(start, *args: str, model: str = "sim", **settings):
    """A server, and a subscriber that knows of its first event."""
    own_port, port, replay_port = free_ports(3)
    flags = ["--kv-events-config", config(port, replay_port, **settings), "--block-size", str(BLOCK), *args]
    with start(model, "--served-model-name", "sim", *flags, port=own_port) as server, contextlib.closing(Subscriber(port, replay_port)) as subscriber:
        # A subscription takes effect some time after it was made: something new is said until it is heard.
        server.wait_for("an event", lambda: attempt(server, prompt(random.Random(), 2 * BLOCK), 1) is not None and subscriber.hears())
        yield server, subscriber


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(97, 123) for _ in range(length)]


def ask(server, tokens: list[int], max_tokens: int = 1, **more) -> dict:
    return attempt(server, tokens, max_tokens, **more).raise_for_status().json()


def attempt(server, tokens: list[int], max_tokens: int, **more) -> httpx.Response:
    body = {"model": "sim", "prompt": tokens, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True, **more}
    return server.http.post(COMPLETIONS, json=body)


def cached_tokens(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("model", ["sim", "sim:window=40"])
def test_a_subscriber_foretells_what_is_found_in_the_cache(start, model):
    seed = random.randrange(2**32)
    print(f"{seed=}")
    rng = random.Random(seed)
    with serving(start, "--max-model-len", "2048", "--enable-sleep-mode", model=model) as (server, subscriber):
        beginnings = [prompt(rng, length) for length in (BLOCK, 3 * BLOCK + 5, 10 * BLOCK)]
        found = 0
        for turn in range(60):
            tokens = rng.choice(beginnings) + prompt(rng, rng.choice([1, BLOCK, 2 * BLOCK + 3]))
            salt = rng.choice([None, None, "a", "b"])
            foretold = subscriber.cache.longest(tokens[:-1], BLOCK, salt)
            answer = ask(server, tokens, max_tokens=rng.choice([1, 20]), **({"cache_salt": salt} if salt else {}))
            assert cached_tokens(answer) == foretold, turn
            found += foretold
            if rng.random() < 0.3:
                # A conversation goes on.
                beginnings.append(tokens + answer["choices"][0]["token_ids"])
            wait_until_known(server, subscriber)
        assert found > 0 and {salt for _, _, salt in subscriber.cache.blocks.values()} == {None, "a", "b"}

        published = len(subscriber.payloads)
        assert server.metric("plimsoll_kv_event_batches_published_total") == published
        assert server.metric("plimsoll_kv_event_batches_dropped_total") == 0
        for since in [0, published // 2, published]:
            assert subscriber.replay(since) == list(subscriber.payloads.items())[since:]
        assert subscriber.gaps == 0

        cleared = subscriber.cache.cleared
        server.http.post("/sleep").raise_for_status()
        server.wait_for("word of it", lambda: subscriber.read() or subscriber.cache.cleared > cleared)
        assert len(subscriber.cache) == 0 and subscriber.cache.cleared == cleared + 1
        server.http.post("/wake_up").raise_for_status()
        answer = ask(server, beginnings[-1])
        assert cached_tokens(answer) == 0
        wait_until_known(server, subscriber)
        assert subscriber.cache.longest(beginnings[-1], BLOCK) > 0


@pytest.mark.parametrize("model", ["sim", "sim:window=40"])
def test_what_is_evicted_is_told(start, model):
    seed = random.randrange(2**32)
    print(f"{seed=}")
    rng = random.Random(seed)
    with serving(start, "--max-model-len", "256", "--max-total-token-num", "1024", "--max-num-seqs", "4", model=model) as (server, subscriber):
        shared = [prompt(rng, 4 * BLOCK) for _ in range(3)]
        for _ in range(6):
            prompts = [rng.choice(shared) + prompt(rng, rng.randrange(1, 8 * BLOCK)) for _ in range(12)]
            with ThreadPoolExecutor(6) as pool:
                list(pool.map(lambda tokens: ask(server, tokens, max_tokens=40), prompts))
            wait_until_known(server, subscriber)
        assert subscriber.cache.removed == server.metric("plimsoll_prefix_cache_evictions_total") > 0
        for beginning in shared:
            tokens = beginning + prompt(rng, 3)
            assert cached_tokens(ask(server, tokens)) == subscriber.cache.longest(tokens[:-1], BLOCK)
            wait_until_known(server, subscriber)


def test_what_is_not_published_in_time_is_told_anew(start):
    seed = random.randrange(2**32)
    print(f"{seed=}")
    rng = random.Random(seed)
    with serving(start, "--max-model-len", "256", "--max-total-token-num", "2048", max_queue_size=1) as (server, subscriber):
        def overflows() -> bool:
            with ThreadPoolExecutor(8) as pool:
                prompts = [prompt(rng, rng.randrange(BLOCK, 9 * BLOCK)) for _ in range(64)]
                list(pool.map(lambda tokens: ask(server, tokens, max_tokens=40), prompts))
            subscriber.read()
            return subscriber.gaps > 0

        server.wait_for("a queue that is full", overflows)
        wait_until_known(server, subscriber)
        # Who asks for what was given up hears the same.
        kept = [sequence for sequence, _ in subscriber.replay(0)]
        assert kept == list(subscriber.payloads)
        dropped = server.metric("plimsoll_kv_event_batches_dropped_total")
        assert dropped == kept[-1] + 1 - len(kept) > 0
        assert server.metric("plimsoll_kv_event_batches_published_total") == len(kept)


def test_steps_that_fail_leave_nothing_behind_that_is_not_told(start):
    seed = random.randrange(2**32)
    print(f"{seed=}")
    rng = random.Random(seed)
    with serving(start, "--max-model-len", "512", model="sim:window=40,fail=70,oom=150") as (server, subscriber):
        shared = prompt(rng, 3 * BLOCK)
        codes = set()
        while not {500, 503} <= codes:
            answer = attempt(server, shared + prompt(rng, rng.randrange(1, 3 * BLOCK)), 20)
            codes.add(answer.status_code)
            server.wait_for("readiness", lambda: server.http.get("/ready").status_code == 200)
            wait_until_known(server, subscriber)
        # That of the start, and that of the cache that was lost.
        assert subscriber.cache.cleared == 1 + server.metric("plimsoll_engine_rebuilds_total", reason="oom") > 1


def test_strangers_on_the_ports_do_no_harm(start):
    hello = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 32)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
    said = [b"GET / HTTP/1.1\r\n\r\n" * 10, hello, hello + ready + b"\x00\x05" + b"\x01" * 5 * 999]
    said += [hello + start + struct.pack(">BQ", 2, length) for start in (b"", ready) for length in (1 << 20, 1 << 40, (1 << 64) - 1)]
    with serving(start) as (server, subscriber):
        strangers = []
        for port in (subscriber.port, subscriber.replay_port):
            for bytes_ in said:
                stranger = socket.create_connection(("127.0.0.1", port))
                stranger.sendall(bytes_)
                strangers.append(stranger)
        # Other sockets of libzmq are turned away, too.
        pusher = subscriber.context.socket(zmq.PUSH)
        pusher.connect(f"tcp://127.0.0.1:{subscriber.port}")
        for _ in range(3):
            ask(server, prompt(random.Random(), 3 * BLOCK))
            wait_until_known(server, subscriber)
        assert subscriber.replay(0) == list(subscriber.payloads.items())
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize("flags, code, named", [
    (['{"enable_kv_cache_events": true, "retries": 3}'], 2, "retries"),
    (['{"enable_kv_cache_events": true, "endpoint": "tcp://router:5557"}'], 2, "tcp://router:5557"),
    (['{"enable_kv_cache_events": true, "hwm": 0}'], 2, "hwm"),
    (['{"enable_kv_cache_events": true}', "--no-enable-prefix-caching"], 2, "--no-enable-prefix-caching"),
])
def test_what_cannot_be_done_is_told_at_once(tmp_path, flags, code, named):
    with process(tmp_path, "sim", "--kv-events-config", *flags) as (child, _, log):
        assert child.wait(60) == code and named in log.read_text()


def test_events_need_a_port_of_their_own(start, tmp_path):
    with serving(start) as (_, subscriber):
        own_port, replay_port = free_ports(2)
        with process(tmp_path, "sim", "--kv-events-config", config(subscriber.port, replay_port), port=own_port) as (child, _, log):
            assert child.wait(60) == 5 and f":{subscriber.port}" in log.read_text()


def test_nobody_is_told_unless_asked_for(sim):
    assert "plimsoll_kv_event" not in sim.http.get("/metrics").text


def test_there_are_no_adapters(sim):
    # The endpoint picker of the Gateway API Inference Extension looks for it at every scrape.
    labels = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert sim.metric("vllm:lora_requests_info", **labels) > 1.7e9
