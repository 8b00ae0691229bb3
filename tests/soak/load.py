"""Well-behaved clients of every part of the API. The simulated model says what a prompt holds between <say> and </say>, so
they know what they must hear, whatever happened to the requests beside theirs."""

import asyncio
import json
import random
import time
from dataclasses import dataclass

from ledger import COMPLETE, FAILED, REFUSED, WRONG, Ledger, judge, parse_error
from target import Target
from wire import PATIENCE, Closed, Exchange, exchange

WORDS = "load line ship hull water mark port star winter tropic fresh salt draught freeboard beam keel cargo tide".split()
# Conversations begin alike, for the prefix cache.
SYSTEMS = [f"You are the mate of ship number {n}. " + " ".join(WORDS[n:] + WORDS[:n]) for n in range(6)]
SCHEMA = {"type": "object", "properties": {"port": {"enum": ["Bristol", "Hull"]}, "tons": {"type": "integer", "minimum": 0, "maximum": 99}},
          "required": ["port", "tons"], "additionalProperties": False}
TOOL = {"name": "stow", "description": "Stows cargo.", "parameters": SCHEMA}
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


class Mismatch(Exception):
    """An answer that is whole, and not what it must be."""


@dataclass
class Ask:
    """A request, and what its answer must hold."""

    workload: str
    path: str
    body: dict | None
    # Takes the parsed body, or the parsed events of a stream.
    check: object
    method: str = "POST"
    # Its time may be over before it is done.
    hurried: bool = False
    # What it must be answered with.
    status: int = 200


def expect(true, what: str, *seen) -> None:
    if not true:
        raise Mismatch(f"{what}: {json.dumps(seen)[:1500]}")


class Maker:
    """Draws requests. `is_simulated`: the text of answers is known."""

    def __init__(self, rng: random.Random, is_simulated: bool, priorities: bool):
        self.rng, self.is_simulated, self.priorities = rng, is_simulated, priorities

    def text(self, least: int, most: int) -> str:
        """So many words."""
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(least, most)))

    def heard(self, wanted: str, got: str) -> None:
        if self.is_simulated:
            expect(got == wanted, "another text was wanted", wanted, got)

    def messages(self, said: str) -> list:
        system = {"role": "system", "content": self.rng.choice(SYSTEMS)}
        return [system, {"role": "user", "content": f"{self.text(0, 8)} <say>{said}</say>"}]

    def options(self) -> dict:
        """What changes no text."""
        drawn = {"seed": self.rng.randrange(1 << 30)}
        if self.priorities and self.rng.random() < 0.3:
            drawn["priority"] = self.rng.randint(-3, 3)
        if self.rng.random() < 0.1:
            drawn["timeout"] = 90
        return drawn

    # --- each returns an Ask

    def chat(self) -> Ask:
        said, n = self.text(2, 30), self.rng.choice([1, 1, 1, 3])
        body = {"messages": self.messages(said), "max_tokens": 300, "n": n, **self.options()}
        if self.rng.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": 3}

        def check(answer):
            choices = answer["choices"]
            expect(len(choices) == n and all(c["finish_reason"] for c in choices), "choices", answer)
            for choice in choices:
                self.heard(said, choice["message"]["content"])
                if body.get("logprobs"):
                    expect(len(choice["logprobs"]["content"]) >= 1, "logprobs", choice)
            expect(answer["usage"]["completion_tokens"] > 0, "usage", answer)

        return Ask("chat", CHAT, body, check)

    def chat_stream(self, hurried: bool = False) -> Ask:
        said, n = self.text(2, 40), self.rng.choice([1, 1, 2])
        body = {"messages": self.messages(said), "max_tokens": 400, "stream": True, "n": n,
                "stream_options": {"include_usage": True}, **self.options()}
        if hurried:
            body |= {"timeout": self.rng.choice([0.05, 0.2, 0.5])}

        def check(events):
            texts, ended = [""] * n, set()
            for choice in (choice for event in events for choice in event["choices"]):
                texts[choice["index"]] += choice["delta"].get("content") or ""
                if choice["finish_reason"]:
                    ended.add(choice["index"])
            expect(len(ended) == n, "not every choice ended", events[-2:])
            expect(events[-1]["usage"]["completion_tokens"] > 0, "usage", events[-1])
            for text in texts:
                self.heard(said, text)

        return Ask("deadline" if hurried else "chat_stream", CHAT, body, check, hurried=hurried)

    def hurried(self) -> Ask:
        return self.chat_stream(hurried=True)

    def tools(self) -> Ask:
        body = {"messages": self.messages(self.text(1, 4)), "max_tokens": 300, "tools": [{"type": "function", "function": TOOL}],
                "tool_choice": "required", **self.options()}

        def check(answer):
            choice = answer["choices"][0]
            if choice["finish_reason"] == "length":
                return
            calls = choice["message"]["tool_calls"]
            expect(calls and calls[0]["function"]["name"] == "stow", "calls", choice)
            expect(set(json.loads(calls[0]["function"]["arguments"])) == {"port", "tons"}, "arguments", choice)

        return Ask("tools", CHAT, body, check)

    def schema(self) -> Ask:
        form = {"type": "json_schema", "json_schema": {"name": "load", "strict": True, "schema": SCHEMA}}
        body = {"messages": self.messages(self.text(1, 4)), "max_tokens": 300, "response_format": form, **self.options()}

        def check(answer):
            choice = answer["choices"][0]
            if choice["finish_reason"] == "stop":
                expect(json.loads(choice["message"]["content"])["port"] in ("Bristol", "Hull"), "schema", choice)

        return Ask("json_schema", CHAT, body, check)

    def completion(self) -> Ask:
        said = self.text(2, 60)
        prompt, scored = f"{self.rng.choice(SYSTEMS)} <say>{said}</say>", self.rng.random() < 0.4
        body = {"prompt": prompt, "max_tokens": 500, **self.options()}
        if scored:
            body |= {"echo": True, "logprobs": 1}

        def check(answer):
            choice = answer["choices"][0]
            expect(choice["finish_reason"], "finish_reason", choice)
            self.heard(prompt + said if scored else said, choice["text"])
            if scored:
                known = choice["logprobs"]["token_logprobs"]
                expect(known[0] is None and len(known) >= answer["usage"]["total_tokens"] - 1, "logprobs", len(known), answer["usage"])

        return Ask("completion_echo" if scored else "completion", COMPLETIONS, body, check)

    def prompt_logprobs(self) -> Ask:
        body = {"prompt": self.text(5, 40), "max_tokens": 1, "prompt_logprobs": 1, **self.options()}

        def check(answer):
            scores = answer["choices"][0]["prompt_logprobs"]
            expect(scores[0] is None and len(scores) == answer["usage"]["prompt_tokens"], "prompt_logprobs", len(scores))

        return Ask("prompt_logprobs", COMPLETIONS, body, check)

    def stop_string(self) -> Ask:
        said = self.text(8, 30)
        at = len(said) // 2
        stop = said[at:at + 3]
        body = {"prompt": f"<say>{said}</say>", "max_tokens": 400, "stop": stop, "stream": True, **self.options()}

        def check(events):
            expect(events[-1]["choices"][0]["finish_reason"], "finish_reason", events[-1:])
            self.heard(said[:said.index(stop)], "".join(event["choices"][0]["text"] for event in events))

        return Ask("stop_string", COMPLETIONS, body, check)

    def anthropic(self) -> Ask:
        said, streams = self.text(2, 20), self.rng.random() < 0.5
        body = {"max_tokens": 300, "system": self.rng.choice(SYSTEMS), "stream": streams,
                "messages": [{"role": "user", "content": f"<say>{said}</say>"}]}

        def check_events(events):
            expect(events[-1]["type"] == "message_stop", "the last event", events[-1])
            deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
            self.heard(said, "".join(deltas))

        def check(answer):
            expect(answer["stop_reason"], "stop_reason", answer)
            self.heard(said, answer["content"][0]["text"])

        return Ask("anthropic", MESSAGES, body, check_events if streams else check)

    def response(self, before: str | None = None, keep=lambda _: None) -> Ask:
        said, streams = self.text(2, 20), self.rng.random() < 0.5
        body = {"input": f"<say>{said}</say>", "max_output_tokens": 300, "stream": streams}
        if before:
            body["previous_response_id"] = before

        def check(answer):
            expect(answer["status"] in ("completed", "incomplete"), "status", answer)
            self.heard(said, answer["output"][0]["content"][0]["text"])
            keep(answer["id"])

        def check_events(events):
            expect(events[-1]["type"] in ("response.completed", "response.incomplete"), "the last event", events[-1])
            check(events[-1]["response"])

        return Ask("responses", RESPONSES, body, check_events if streams else check)

    def tokenize(self) -> Ask:
        def check(answer):
            expect(answer["count"] == len(answer["tokens"]) > 0, "tokens", answer)

        return Ask("tokenize", "/tokenize", {"prompt": self.text(1, 60)}, check)

    def count_tokens(self) -> Ask:
        body = {"messages": [{"role": "user", "content": self.text(1, 20)}]}
        return Ask("count_tokens", f"{MESSAGES}/count_tokens", body, lambda answer: expect(answer["input_tokens"] > 0, "count", answer))

    def models(self) -> Ask:
        return Ask("models", "/v1/models", None, lambda answer: expect(answer["data"], "models", answer), method="GET")

    def memory(self) -> Ask:
        return Ask("memory", "/memory", None, lambda answer: expect(answer["now"], "memory", answer), method="GET")

    def bulk(self) -> str:
        """Megabytes of words."""
        return (self.text(2000, 2000) + " ") * self.rng.choice([60, 120, 300])

    def large(self) -> Ask:
        """The end of it is computed."""
        said = self.text(2, 20)
        body = {"prompt": f"{self.bulk()} <say>{said}</say>", "truncate_prompt_tokens": 512, "max_tokens": 300, **self.options()}

        def check(answer):
            expect(answer["usage"]["prompt_tokens"] == 512, "prompt_tokens", answer["usage"])
            self.heard(said, answer["choices"][0]["text"])

        return Ask("large_prompt", COMPLETIONS, body, check)

    def too_large(self) -> Ask:
        body = {"messages": [{"role": "user", "content": self.bulk()}], "max_tokens": 8, "stream": True}
        return Ask("too_large", CHAT, body, None, status=400)

    def embeddings(self) -> Ask:
        inputs = [self.text(1, 60) for _ in range(self.rng.randint(1, 4))]

        def check(answer):
            vectors = [item["embedding"] for item in answer["data"]]
            expect(len(vectors) == len(inputs), "vectors", len(vectors))
            expect(all(0.99 < sum(x * x for x in vector) < 1.01 for vector in vectors), "unit length", vectors[:1])

        return Ask("embeddings", "/v1/embeddings", {"input": inputs}, check)

    TEXT = [(chat, 6), (chat_stream, 8), (hurried, 1), (tools, 2), (schema, 2), (completion, 6), (prompt_logprobs, 1), (stop_string, 2),
            (anthropic, 3), (response, 3), (tokenize, 1), (count_tokens, 1), (models, 1), (memory, 0.3)]
    LARGE = [(large, 2), (too_large, 1)]
    VECTORS = [(embeddings, 8), (tokenize, 1), (models, 1)]

    def draw(self, kinds: list) -> Ask:
        [kind] = self.rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
        return kind(self)


def stream_error(event: dict) -> dict | None:
    """The error that an event tells of."""
    failed = event.get("response") or {}
    return event.get("error") or (failed.get("error") if isinstance(failed, dict) else None)


async def read(one: Exchange, ask: Ask) -> tuple[str, str]:
    """The outcome of an answer whose head has come."""
    if one.status == ask.status != 200:
        error = parse_error(await one.body())
        expect(error, "an error was wanted", one.status)
        return REFUSED, ""
    if one.status != 200:
        return judge(one.status, parse_error(await one.body()), one.headers.get("retry-after"), ask.hurried)
    if not (ask.body or {}).get("stream"):
        ask.check(json.loads(await one.body()))
        return COMPLETE, ""
    data = [event async for event in one.events()]
    if ask.path in (CHAT, COMPLETIONS):
        expect(data and data[-1] == "[DONE]", "the stream does not end with [DONE]", data[-2:])
        data.pop()
    events = [json.loads(event) for event in data]
    error = next(filter(None, map(stream_error, events)), None)
    if error:
        return judge(200, error, None, ask.hurried)
    ask.check(events)
    return COMPLETE, ""


async def send(target: Target, ledger: Ledger, key: str, ask: Ask) -> str:
    """Sends a request and notes what became of it."""
    try:
        async with asyncio.timeout(PATIENCE), exchange(target.port, ask.method, ask.path, ask.body, target.keys[key]) as one:
            ledger.saw(one.status)
            outcome, detail = await read(one, ask)
    except TimeoutError:
        outcome, detail = WRONG, f"no whole answer within {PATIENCE} s"
    except (Closed, OSError) as error:
        outcome, detail = WRONG, str(error)
    except (Mismatch, ValueError, KeyError, TypeError, IndexError) as error:
        outcome, detail = WRONG, repr(error)
    ledger.note(ask.workload, outcome, f"{detail} for {json.dumps(ask.body)[:500]}")
    return outcome


async def crowd(target: Target, ledger: Ledger, maker: Maker, kinds: list, stop: asyncio.Event, pause: float) -> None:
    """A client that asks one thing after the other."""
    while not stop.is_set():
        ask = maker.draw(kinds)
        kept = []
        if ask.workload == "responses":
            ask = maker.response(keep=kept.append)
        if await send(target, ledger, "crowd", ask) == FAILED:
            # As told by Retry-After.
            await asyncio.sleep(1)
        if kept and maker.is_simulated:
            await send(target, ledger, "crowd", maker.response(before=kept[0]))
        await asyncio.sleep(maker.rng.expovariate(1 / pause))


async def hauler(target: Target, ledger: Ledger, maker: Maker, stop: asyncio.Event, pause: float) -> None:
    """A client whose prompts are megabytes."""
    # A server of somebody else's may have room for all of it.
    kinds = Maker.LARGE if maker.priorities else Maker.LARGE[:1]
    while not stop.is_set():
        await send(target, ledger, "hauler", maker.draw(kinds))
        await asyncio.sleep(maker.rng.expovariate(1 / pause))


async def neighbour(target: Target, ledger: Ledger, maker: Maker, stop: asyncio.Event, pause: float) -> None:
    """A client with little to ask, whose latency nobody may spoil."""
    while not stop.is_set():
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True, "seed": 1}
        ask = Ask("neighbour", CHAT, body, lambda answer: expect(answer["usage"]["completion_tokens"] == 4, "usage", answer))
        began = time.monotonic()
        if await send(target, ledger, "neighbour", ask) == COMPLETE:
            ledger.latencies.append((began, time.monotonic() - began))
        await asyncio.sleep(maker.rng.expovariate(1 / pause))


async def scraper(target: Target, ledger: Ledger, stop: asyncio.Event) -> None:
    """Prometheus, Kubernetes and a curious person."""
    while not stop.is_set():
        for path, good in [("/metrics", {200}), ("/health", {200}), ("/ready", {200, 503}), ("/openapi.json", {200})]:
            try:
                async with asyncio.timeout(PATIENCE), exchange(target.port, "GET", path) as one:
                    await one.body()
                    known = one.status in good
                    ledger.note("probes", COMPLETE if one.status == 200 else FAILED if known else WRONG, f"{path}: {one.status}")
            except (Closed, OSError, TimeoutError) as error:
                ledger.note("probes", WRONG, f"{path}: {error!r}")
        await asyncio.sleep(5)
