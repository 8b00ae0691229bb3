"""Hours of mixed load with clients that hang up, read slowly, are stopped or killed, send what is malformed or too much, and
with steps that fail or find no memory; and at the end the question whether anything was lost, leaked or got slower.

Starts two servers with the simulated model, one for text and one for embeddings, from target/debug/plimsoll or SERVER_BINARY;
or one with a real model, on a GPU too (--serve; scripts/soak-h200); or attaches to one that runs on this machine (--attach).
Exit codes: 0 passed, 1 an invariant is broken, 3 inconclusive: what must happen for the soak to mean anything did not; give it
more time.
"""

import argparse
import asyncio
import json
import math
import os
import platform
import random
import shlex
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import chaos
import invariants
import load
from invariants import Record
from ledger import COMPLETE, CUT, FAILED, LATE, LEFT, REFUSED, WRONG, Ledger
from target import KEYS, Page, Target, start
from wire import Closed

INCONCLUSIVE = 3
# Steps take as long as a real model's, which costs this machine nothing. Prime numbers: faults meet every kind of step.
MODEL = ["sim:0.02,fail=499,oom=2503", "--served-model-name", "sim"]
# So narrow that the load is too much for it.
TEXT = ["--max-model-len", "2048", "--max-num-seqs", "16", "--max-total-token-num", "4096", "--max-queue", "64",
        "--max-concurrent-requests-per-key", "24", "--slow-client-timeout", "2", "--request-timeout", "45",
        "--scheduling-policy", "priority", "--response-store-max-count", "256", "--enable-sleep-mode"]
VECTORS = ["sim:0.02,fail=499", "--runner", "pooling", "--served-model-name", "embedder", "--max-model-len", "1024",
           "--max-total-token-num", "2048"]
SAMPLE_SECONDS = 2
# Pools and caches fill in the first round, a quarter of the time; none is longer than this.
FIRST_ROUND, ROUND_SECONDS = 0.25, 900
SAY_SECONDS = 10
# Clients that ask all the time, and how long each waits between two requests, in seconds.
CROWD, PAUSE = 10, 0.4
SETTLE_SECONDS = 90
# Longer than the server's pool keeps a thread that has nothing to do, and its allocator what is free. Whoever looks meanwhile
# gives the thread something to do.
IDLE_SECONDS = 15
DRAINED = 6


class Soak:
    """One server's share of the soak."""

    def __init__(self, target: Target, name: str, args: argparse.Namespace):
        self.target, self.name, self.args = target, name, args
        self.ledger, self.resident, self.quiet = Ledger(), [], []
        self.is_simulated = args.attach is None and args.serve is None
        self.before = self.latest = self.version = None

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.args.seed}/{self.name}/{len(self.quiet)}/{name}")

    def maker(self, name: str) -> load.Maker:
        return load.Maker(self.rng(name), self.is_simulated, priorities=self.args.attach is None)

    async def warm_up(self) -> None:
        """What the first requests bring to life stays: threads, grammars. It is there when the soak begins."""
        maker, ledger = self.maker("warm-up"), Ledger()
        kinds = load.Maker.VECTORS if self.name == "embeddings" else load.Maker.TEXT
        await asyncio.gather(*(load.send(self.target, ledger, "crowd", kind(maker)) for kind, _ in kinds))
        if ledger.defects:
            raise SystemExit(f"soak: BROKEN before it began: {ledger.defects[0]}")
        # Threads without work end by themselves.
        await asyncio.sleep(IDLE_SECONDS)
        self.before = await self.target.page()
        self.version = await self.target.version()

    def agents(self, stop: asyncio.Event) -> list:
        """Everybody who talks to the server."""
        target, ledger = self.target, self.ledger
        if self.name == "embeddings":
            return [load.crowd(target, ledger, self.maker(f"crowd {i}"), load.Maker.VECTORS, stop, 1.0) for i in range(2)]
        crowd = [load.crowd(target, ledger, self.maker(f"crowd {i}"), load.Maker.TEXT, stop, PAUSE) for i in range(CROWD)]
        return [
            *crowd,
            load.neighbour(target, ledger, self.maker("neighbour"), stop, 1.0),
            load.hauler(target, ledger, self.maker("hauler"), stop, 4.0),
            load.scraper(target, ledger, stop),
            chaos.leavers(target, ledger, self.rng("leavers"), stop),
            chaos.slow_reader(target, ledger, self.maker("slow reader"), stop),
            chaos.victims(target, ledger, self.rng("victims"), stop),
            chaos.malformed(target, ledger, self.rng("malformed"), stop),
            chaos.flood(target, ledger, self.maker("flood"), stop),
            chaos.sleeper(target, ledger, self.rng("sleeper"), stop, max(20.0, self.args.minutes * 60 / 8)),
        ]

    async def watch(self, stop: asyncio.Event) -> None:
        """Samples the server until the end."""
        while not stop.is_set() and self.target.ended() is None:
            page = self.latest = await self.target.page()
            self.resident.append(page.sum("process_resident_memory_bytes"))
            await chaos.pause(stop, SAMPLE_SECONDS)

    def line(self) -> str:
        """How it stands, for people."""
        ledger, page = self.ledger, self.latest or Page("")
        counts = ", ".join(f"{ledger.total(kind)} {kind}" for kind in [COMPLETE, REFUSED, FAILED, LATE, LEFT, CUT, WRONG])
        return (f"{self.name}: {counts}; {page.sum('plimsoll_requests_running'):.0f} running, "
                f"{page.sum('plimsoll_requests_waiting'):.0f} waiting, {page.sum('plimsoll_preemptions_total'):.0f} preemptions, "
                f"{page.sum('plimsoll_steps_failed_total'):.0f} failed steps, {page.sum('process_resident_memory_bytes') / 2**20:.1f} MiB")

    async def is_quiet(self) -> bool:
        """Nobody is in, and what was there for them is gone."""
        page = self.latest = await self.target.page()
        waiting = ["plimsoll_requests_in_flight", "plimsoll_requests_running", "plimsoll_requests_waiting"]
        return not (any(page.sum(name) for name in waiting) or page.sum("plimsoll_kv_blocks", state="used")
                    or page.sum("plimsoll_http_requests_in_flight") > 1)

    async def settle(self) -> None:
        """Waits until all is quiet and what is free has gone back to the system; notes what is left."""
        if self.target.ended() is not None:
            return
        await self.target.wait(f"quiet of {self.name}", self.is_quiet, SETTLE_SECONDS)
        await self.target.wait(f"readiness of {self.name}", self.target.ready, SETTLE_SECONDS)
        await asyncio.sleep(IDLE_SECONDS)
        self.quiet.append((await self.target.page()).sum("process_resident_memory_bytes"))

    async def end(self) -> Record:
        """Looks once more, and drains."""
        target = self.target
        died = target.ended() is not None
        record = Record(
            ledger=self.ledger, before=self.before, after=self.latest if died else await target.page(), quiet=self.quiet,
            resident=self.resident, ready=not died and await target.ready(), died=died, latency_bound=self.args.latency_bound,
            injects=self.is_simulated)
        if target.process and not died:
            record.drained, record.exit_code = await self.drain()
        elif died:
            record.exit_code = target.ended()
        record.log = target.log_text()
        return record

    async def drain(self) -> tuple[list[str], int]:
        """SIGTERM while requests are in: what becomes of them, and the exit code."""
        maker, ledger = self.maker("drain"), Ledger()
        draw = maker.embeddings if self.name == "embeddings" else maker.chat
        asks = [draw() for _ in range(DRAINED)]
        # Every answer, and every vector, is a request of the engine.
        wanted = sum(ask.body.get("n", 1) if "messages" in ask.body else len(ask.body["input"]) for ask in asks)
        submitted = "plimsoll_requests_submitted_total"
        before = (await self.target.page()).sum(submitted)
        asked = [asyncio.create_task(load.send(self.target, ledger, "crowd", ask)) for ask in asks]

        async def are_in() -> bool:
            return (await self.target.page()).sum(submitted) >= before + wanted

        await self.target.wait(f"what {self.name} drains", are_in, SETTLE_SECONDS)
        code = await self.target.stop()
        outcomes = await asyncio.gather(*asked)
        # A step that was told to fail is no fault of the drain.
        return [COMPLETE if outcome == FAILED else outcome for outcome in outcomes], code


async def say(soaks: list[Soak], began: float, stop: asyncio.Event) -> None:
    while not stop.is_set():
        await chaos.pause(stop, SAY_SECONDS)
        for soak in soaks:
            print(f"{time.monotonic() - began:6.0f} s  {soak.line()}", flush=True)


async def talk(soaks: list[Soak], seconds: float, began: float) -> list[str]:
    """Everybody talks for so long, then all is quiet. What failed."""
    stop = asyncio.Event()
    work = [say(soaks, began, stop), *(work for soak in soaks for work in [soak.watch(stop), *soak.agents(stop)])]
    tasks = [asyncio.create_task(one) for one in work]
    # One that fails has met the end of the server, or is wrong itself.
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    stop.set()
    failures = [repr(result) for result in await asyncio.gather(*tasks, return_exceptions=True) if result]
    await asyncio.gather(*(soak.settle() for soak in soaks))
    return failures


def rounds(seconds: float) -> list[float]:
    """Seconds of each round: after it all is quiet."""
    first = min(FIRST_ROUND * seconds, ROUND_SECONDS)
    rest = seconds - first
    count = math.ceil(rest / ROUND_SECONDS)
    return [first, *[rest / count] * count]


async def run(args: argparse.Namespace) -> int:
    async with AsyncExitStack() as stack:
        if args.attach:
            targets = {"text": Target(args.attach, dict.fromkeys(KEYS, args.key))}
        else:
            directory = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
            directory.mkdir(parents=True, exist_ok=True)
            servers = {"text": [*shlex.split(args.serve), *TEXT]} if args.serve else {"text": [*MODEL, *TEXT], "embeddings": VECTORS}
            targets = {name: await stack.enter_async_context(start(directory, name, *flags)) for name, flags in servers.items()}
        soaks = [Soak(target, name, args) for name, target in targets.items()]
        await asyncio.gather(*(soak.warm_up() for soak in soaks))
        began, seconds = time.monotonic(), args.minutes * 60
        failures = []
        for part in rounds(seconds):
            if not failures:
                failures = await talk(soaks, part, began)
        records = {soak.name: await soak.end() for soak in soaks}
        return judge(args, soaks, records, time.monotonic() - began, failures)


def judge(args: argparse.Namespace, soaks: list[Soak], records: dict[str, Record], seconds: float, failures: list[str]) -> int:
    broken = [f"{name}: {text}" for name, record in records.items() for text in invariants.broken(record)]
    broken += [f"an agent failed: {failure}" for failure in failures]
    missed = [f"text: {name}" for name in invariants.missed(records["text"])] if not args.attach else []
    if "embeddings" in records:
        missed += [f"embeddings: {name}" for name in invariants.missed_vectors(records["embeddings"])]
    verdict = "broken" if broken else "inconclusive" if missed else "passed"
    report = {"verdict": verdict, "seed": args.seed, "seconds": round(seconds, 1), "command": shlex.join(["tests/soak", *sys.argv[1:]]),
              "machine": f"{os.cpu_count()} x {platform.machine()}", "server": soaks[0].version, "broken": broken, "missed": missed,
              "servers": {name: numbers(record) for name, record in records.items()}}
    for soak in soaks:
        print(f"{seconds:6.0f} s  {soak.line()}")
        if broken and soak.target.log:
            print(f"--- the end of the log of {soak.name} ---\n{soak.target.log_text()[-6000:]}\n---")
    for text in broken:
        print(f"soak: BROKEN: {text}")
    for text in missed:
        print(f"soak: did not happen: {text}")
    print(json.dumps(report["servers"], indent=1))
    print(f"soak: {verdict} after {seconds:.0f} s, seed {args.seed}", flush=True)
    if args.output_json:
        args.output_json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if broken else INCONCLUSIVE if missed else 0


def numbers(record: Record) -> dict:
    """What a reader of the report wants to know."""
    taken = [seconds for _, seconds in record.ledger.latencies]
    mib = lambda value: round(value / 2**20, 2)
    return {
        "requests": record.ledger.requests(),
        "outcomes": {name: dict(counts) for name, counts in sorted(record.ledger.outcomes.items())},
        "codes": dict(sorted(record.ledger.codes.items())),
        "steps": record.since("plimsoll_steps_total"),
        "steps_failed": record.since("plimsoll_steps_failed_total"),
        "states_rebuilt": {reason: record.since("plimsoll_engine_rebuilds_total", reason=reason) for reason in ["oom", "wake"]},
        "preemptions": {cause: record.since("plimsoll_preemptions_total", cause=cause) for cause in ["kv_full", "kv_lost"]},
        "tokens": record.since("plimsoll_generation_tokens_total"),
        "neighbour_seconds": {f"p{q}": round(invariants.quantile(taken, q / 100), 3) for q in [50, 95, 99]} if taken else None,
        "resident_mib": {"quiet": [mib(resident) for resident in record.quiet],
                         "over_time": [mib(resident) for resident in record.resident[::len(record.resident) // 24 + 1]]},
        "device_bytes": {"start": record.before.sum("plimsoll_device_memory_bytes"), "end": record.after.sum("plimsoll_device_memory_bytes")},
        "threads": {"start": record.before.sum("process_threads"), "end": record.after.sum("process_threads")},
        "files": {"start": record.before.sum("process_open_fds"), "end": record.after.sum("process_open_fds")},
        "drain": {"exit_code": record.exit_code, "requests": len(record.drained), "complete": record.drained.count(COMPLETE)},
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30), help="every decision of the clients comes from it")
    parser.add_argument("--serve", metavar="ARGS", help="a model and more flags of plimsoll serve, in one word, in place of the "
                        "simulated models")
    parser.add_argument("--attach", type=int, metavar="PORT", help="a server that runs on this machine, in place of our own")
    parser.add_argument("--key", help="its API key")
    parser.add_argument("--latency-bound", type=float, default=10.0, metavar="SECONDS", help="of the neighbour's p99")
    parser.add_argument("--output-json", type=Path, metavar="FILE")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the servers' logs here")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    print(f"soak: {args.minutes:g} minutes, seed {args.seed}", flush=True)
    # The servers end with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return asyncio.run(run(args))
    except (Closed, OSError) as error:
        print(f"soak: BROKEN: the server does not answer: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
