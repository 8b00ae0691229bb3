"""Clients that do not behave, and operators who put the server to sleep."""

import asyncio
import contextlib
import json
import random
import signal
import sys
from pathlib import Path

from ledger import COMPLETE, CUT, FAILED, REFUSED, WRONG, Ledger, judge, parse_error
from load import CHAT, Ask, Maker, Mismatch, send
from target import Target
from wire import PATIENCE, Closed, call, exchange, message

HERE = Path(__file__).parent
# Malformed requests between two looks at the clock.
ROUND = 60


def long_stream(rng: random.Random, tokens: int) -> dict:
    return {"messages": [{"role": "user", "content": f"Talk {rng.random()}."}], "max_tokens": tokens, "n": rng.choice([1, 2, 4]),
            "ignore_eos": True, "stream": rng.random() < 0.8}


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """So long, or until the end."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        pass


async def leavers(target: Target, ledger: Ledger, rng: random.Random, stop: asyncio.Event) -> None:
    """Clients that hang up: before the answer, after some of it, or in the middle of what they send."""
    while not stop.is_set():
        if rng.random() < 0.2:
            await half_a_request(target, rng)
            ledger.left("half_request")
        else:
            await leave(target, ledger, rng)
        await pause(stop, rng.expovariate(1 / 0.7))


async def half_a_request(target: Target, rng: random.Random) -> None:
    whole = message("POST", CHAT, long_stream(rng, 50), target.keys["chaos"])
    _, writer = await asyncio.open_connection("127.0.0.1", target.port)
    writer.write(whole[:rng.randrange(1, len(whole))])
    await asyncio.sleep(rng.random())
    writer.transport.abort()


async def leave(target: Target, ledger: Ledger, rng: random.Random) -> None:
    async def read(pieces: int) -> None:
        async with exchange(target.port, "POST", CHAT, long_stream(rng, 600), target.keys["chaos"]) as one:
            async for _ in one.chunks():
                pieces -= 1
                if pieces <= 0:
                    return

    try:
        await asyncio.wait_for(read(rng.choice([1, 5, 30])), rng.choice([0.02, 0.3, 3]))
    except (TimeoutError, Closed, OSError):
        pass
    ledger.left("hang_up")


async def slow_reader(target: Target, ledger: Ledger, maker: Maker, stop: asyncio.Event) -> None:
    """Reads a little now and then: slow is no reason to be cut off. Its buffer takes a segment of the loopback's 64 KiB; with less,
    the kernel holds the window for closed."""
    while not stop.is_set():
        ask = maker.chat_stream()
        try:
            async with (asyncio.timeout(PATIENCE),
                        exchange(target.port, "POST", CHAT, ask.body, target.keys["chaos"], buffer=60_000) as one):
                ledger.saw(one.status)
                body = b""
                async for chunk in one.chunks():
                    body += chunk
                    await asyncio.sleep(maker.rng.random() / 50)
                outcome, detail = slow_outcome(ask, one, body)
        except (Closed, OSError, TimeoutError, Mismatch) as error:
            outcome, detail = WRONG, repr(error)
        ledger.note("slow_reader", outcome, detail)
        await pause(stop, maker.rng.expovariate(1 / 2))


def slow_outcome(ask: Ask, one, body: bytes) -> tuple[str, str]:
    if one.status != 200:
        return judge(one.status, parse_error(body), one.headers.get("retry-after"), False)
    data = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
    for line in data:
        error = parse_error(line)
        if error:
            return judge(200, error, None, False)
    if not data or data[-1] != b"[DONE]":
        return WRONG, f"the stream ends with {data[-1:]}"
    ask.check([json.loads(line) for line in data[:-1]])
    return COMPLETE, ""


async def victims(target: Target, ledger: Ledger, rng: random.Random, stop: asyncio.Event) -> None:
    """Processes that are stopped for a while, or killed, while they read."""
    while not stop.is_set():
        child = await asyncio.create_subprocess_exec(
            sys.executable, HERE / "victim.py", str(target.port), target.keys["chaos"] or "", stdout=asyncio.subprocess.PIPE)
        try:
            began = (await asyncio.wait_for(child.stdout.readline(), PATIENCE)).strip()
            if began == b"reading":
                await asyncio.sleep(rng.random())
                if rng.random() < 0.4:
                    tell(child, signal.SIGKILL)
                    ledger.left("killed")
                else:
                    await freeze(child, ledger, rng, stop)
            else:
                ledger.left(f"victim_{began.decode() or 'ended'}")
        except TimeoutError:
            ledger.note("victim", WRONG, "it heard nothing")
        finally:
            tell(child, signal.SIGKILL)
            await child.wait()
        await pause(stop, rng.expovariate(1 / 6))


def tell(child, what: signal.Signals) -> None:
    """Signals a process, which may have ended."""
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(what)


async def freeze(child, ledger: Ledger, rng: random.Random, stop: asyncio.Event) -> None:
    tell(child, signal.SIGSTOP)
    await pause(stop, rng.uniform(1, 25))
    tell(child, signal.SIGCONT)
    end = (await asyncio.wait_for(child.stdout.readline(), PATIENCE)).strip().decode()
    ledger.unseen += 1
    outcome = {"complete": COMPLETE, "cut": CUT}.get(end, WRONG)
    ledger.note("stopped", outcome, f"it ended with {end!r}")


async def malformed(target: Target, ledger: Ledger, rng: random.Random, stop: asyncio.Event) -> None:
    while not stop.is_set():
        child = await asyncio.create_subprocess_exec(
            sys.executable, HERE / "malformed.py", str(target.port), str(rng.randrange(1 << 30)), str(ROUND),
            target.keys["mallory"] or "", stdout=asyncio.subprocess.PIPE)
        result = json.loads((await child.communicate())[0] or "null")
        if child.returncode or not result:
            ledger.note("malformed", WRONG, "the client failed")
        else:
            ledger.outcomes["malformed"][REFUSED] += result["sent"] - result["wrong_count"]
            ledger.codes.update({code: count for code, count in result["codes"].items() if count})
            ledger.unseen += result["unseen"]
            for wrong in result["wrong"]:
                ledger.note("malformed", WRONG, wrong)
        await pause(stop, rng.expovariate(1 / 4))


async def flood(target: Target, ledger: Ledger, maker: Maker, stop: asyncio.Event) -> None:
    """More at once than a key may have: what is too much is refused."""
    while not stop.is_set():
        async with asyncio.TaskGroup() as group:
            for _ in range(maker.rng.choice([10, 40])):
                group.create_task(send(target, ledger, "flood", maker.completion()))
        await pause(stop, maker.rng.expovariate(1 / 15))


async def sleeper(target: Target, ledger: Ledger, rng: random.Random, stop: asyncio.Event, every: float) -> None:
    """Takes the memory away for a moment, now and then."""
    while not stop.is_set():
        await pause(stop, every)
        try:
            patience = rng.choice([2, 20])
            status, body, _ = await call(target.port, "POST", f"/sleep?timeout={patience}", key=target.keys["chaos"])
            if status == 404:
                # It has no sleep mode.
                return
            if status == 200:
                await asyncio.sleep(rng.random())
                status, body, _ = await call(target.port, "POST", "/wake_up", key=target.keys["chaos"])
        except (Closed, OSError, TimeoutError) as error:
            ledger.note("sleep", WRONG, repr(error))
            continue
        # It was not the moment: requests went on for too long, or a state was being built.
        outcome = {200: COMPLETE, 409: REFUSED, 503: FAILED}.get(status, WRONG)
        ledger.note("sleep", outcome, f"{status}: {body[:300]!r}")
