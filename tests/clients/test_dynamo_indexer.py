"""Dynamo's standalone indexer as it is, subscribed to two servers by the requests of docs/scale-out.md."""

import contextlib
import json
import random
import re
import subprocess
import sys

import httpx2 as httpx
from conftest import HTTP, fixtures

sys.path.insert(0, str(HTTP))
from kv_events import config  # noqa: E402

GUIDE = fixtures.ROOT / "docs/scale-out.md"
BLOCK = 16
MODEL = "Qwen/Qwen3-8B"


class Indexer:
    """The process, and what the guide sends it."""

    def __init__(self, port: int, log):
        self.port = port
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)
        section = GUIDE.read_text().split("\n## Dynamo\n")[1]
        requests = re.findall(r"curl INDEXER/(\w+) .*?-d '(.*?)'", section, re.DOTALL)
        self.requests = {path: json.loads(body) for path, body in requests}
        assert set(self.requests) == {"register", "query"}
        self.process = subprocess.Popen([sys.executable, "-m", "dynamo.indexer", "--port", str(self.port)], stdout=log, stderr=log)

    def listens(self) -> bool:
        assert self.process.poll() is None, "the indexer ended"
        with contextlib.suppress(httpx.ConnectError):
            return self.http.get("/workers").status_code == 200
        return False

    def register(self, instance: int, port: int, replay_port: int) -> None:
        at = {"endpoint": f"tcp://127.0.0.1:{port}", "replay_endpoint": f"tcp://127.0.0.1:{replay_port}"}
        self.http.post("/register", json={**self.requests["register"], "instance_id": instance, **at}).raise_for_status()

    def cached(self, instance: int, tokens: list[int], **salt: str) -> int:
        """Tokens at the beginning of `tokens` that a server has."""
        answer = self.http.post("/query", json={**self.requests["query"], "token_ids": tokens, **salt}).raise_for_status().json()
        return answer["scores"].get(str(instance), {}).get("0", 0)


def ask(server, tokens: list[int], **salt: str) -> int:
    body = {"model": MODEL, "prompt": tokens, "max_tokens": 1, **salt}
    usage = server.http.post("/v1/completions", json=body).raise_for_status().json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_dynamos_indexer_knows_which_server_has_a_prompt(start, tmp_path):
    seed = random.randrange(2**32)
    print(f"{seed=}")
    rng = random.Random(seed)
    words = lambda length: [rng.randrange(97, 123) for _ in range(length)]  # noqa: E731
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((tmp_path / "indexer.log").open("wb"))
        indexer_port, *ports = fixtures.free_ports(7)
        indexer = Indexer(indexer_port, log)
        stack.callback(indexer.process.kill)
        servers = {}
        for instance in (1, 2):
            own_port, port, replay_port = (ports.pop() for _ in range(3))
            flags = ["--kv-events-config", config(port, replay_port), "--block-size", str(BLOCK), "--max-model-len", "2048"]
            flags += ["--served-model-name", MODEL, "--enable-sleep-mode"]
            server = servers[instance] = stack.enter_context(start("sim", *flags, port=own_port))
            # The indexer comes late: what was stored before, it has to ask for.
            early = words(4 * BLOCK)
            ask(server, early)
            server.wait_for("the indexer", indexer.listens)
            indexer.register(instance, port, replay_port)

            def knows(early: list[int] = early, instance: int = instance) -> bool:
                ask(servers[instance], words(BLOCK + 1))  # a subscription takes effect some time after it was made
                return indexer.cached(instance, early) == len(early)

            server.wait_for("what was stored before", knows)

        beginnings, found = [words(length) for length in (BLOCK, 3 * BLOCK + 5, 10 * BLOCK)], 0
        for _ in range(60):
            prompt = rng.choice(beginnings) + words(rng.randrange(1, 5 * BLOCK))
            salt = rng.choice([{}, {}, {"cache_salt": "pepper"}])
            # The last token is computed in any case.
            foretold = {instance: indexer.cached(instance, prompt[:-1], **salt) for instance in servers}
            instance = rng.choice([1, 2])
            assert ask(servers[instance], prompt, **salt) == foretold[instance]
            found += foretold[instance]
            whole = len(prompt) // BLOCK * BLOCK
            servers[instance].wait_for("what was stored now", lambda: indexer.cached(instance, prompt, **salt) == whole)
            other = 3 - instance
            assert indexer.cached(other, prompt[:-1], **salt) == foretold[other]
        print(f"{found} tokens foretold")
        assert found > 0

        # A server that sleeps has nothing; the other keeps what it has.
        kept = words(6 * BLOCK)
        for instance, server in servers.items():
            ask(server, kept)
            server.wait_for("what both have", lambda instance=instance: indexer.cached(instance, kept) == len(kept))
        servers[1].http.post("/sleep").raise_for_status()
        servers[1].wait_for("an empty cache", lambda: indexer.cached(1, kept) == 0)
        assert indexer.cached(2, kept) == len(kept)
        servers[1].http.post("/wake_up").raise_for_status()
        assert (ask(servers[1], kept), ask(servers[2], kept)) == (0, len(kept) - BLOCK)
