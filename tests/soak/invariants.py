"""What must be true at the end of a soak, and what must have happened in it for that to mean anything. Pure functions."""

from dataclasses import dataclass, field

from ledger import COMPLETE, CUT, LATE, REFUSED, Ledger
from target import Page

# Growth of resident memory since the first quiet moment, however long the soak.
RSS_BYTES = 24 << 20
RSS_PART = 0.05
# Threads and descriptors more than at the start: a scrape on its way, a thread of the blocking pool that still waits.
SLACK = 4
# A failing step fails its requests, and everybody in it.
ENDS = ["plimsoll_requests_finished_total", "plimsoll_requests_cancelled_total", "plimsoll_requests_failed_total"]
ENDPOINTS = [
    "chat", "chat_stream", "tools", "json_schema", "completion", "completion_echo", "prompt_logprobs", "stop_string", "anthropic",
    "responses", "tokenize", "count_tokens", "models", "memory", "large_prompt",
]


@dataclass
class Record:
    """All that is known about one server's soak."""

    ledger: Ledger
    before: Page
    after: Page
    # Resident bytes while nobody asked for anything: once pools and caches were filled, after each further round, and at the end.
    quiet: list[float]
    # And under load, for people.
    resident: list[float] = field(default_factory=list)
    log: str = ""
    # Whether it was ready at the end.
    ready: bool = True
    # It ended before it was told to.
    died: bool = False
    # Of the drain; `None` where the server is somebody else's.
    exit_code: int | None = 0
    # Requests that were in when the drain began, and what became of them.
    drained: list[str] = field(default_factory=list)
    latency_bound: float = 10.0
    # Whether steps were told to go wrong.
    injects: bool = True

    def since(self, name: str, **labels: str) -> float:
        return self.after.sum(name, **labels) - self.before.sum(name, **labels)


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def broken(record: Record) -> list[str]:
    """The invariants that do not hold, each with its numbers."""
    return [*leaks(record), *lost(record), *health(record)]


def leaks(record: Record) -> list[str]:
    found = []
    blocks = record.after.by("plimsoll_kv_blocks", "state")
    if blocks.get("used"):
        found.append(f"leaked blocks: {blocks['used']:.0f} of {blocks['total']:.0f} in use although no request is in")
    if blocks.get("cached", 0) > blocks.get("total", 0):
        found.append(f"leaked blocks: {blocks['cached']:.0f} cached of {blocks['total']:.0f}")
    if record.after.sum("plimsoll_kv_tail_tokens"):
        found.append("leaked blocks: some still have a tail")
    for name in ["plimsoll_requests_in_flight", "plimsoll_requests_running", "plimsoll_requests_waiting"]:
        if left := record.after.sum(name):
            found.append(f"lost requests: {name} is {left:.0f} at the end")
    # The one that asks is one.
    if (open_now := record.after.sum("plimsoll_http_requests_in_flight")) > 1:
        found.append(f"lost requests: {open_now:.0f} HTTP requests in flight at the end")
    if record.quiet and max(record.quiet) - record.quiet[0] > max(RSS_BYTES, RSS_PART * record.quiet[0]):
        quiet = ", ".join(f"{resident / 2**20:.1f}" for resident in record.quiet)
        found.append(f"host memory grows: {quiet} MiB when all was quiet")
    start, end = (page.sum("plimsoll_device_memory_bytes") for page in (record.before, record.after))
    if end > start:
        found.append(f"device memory grows: {start:.0f} bytes at the start, {end:.0f} at the end")
    for name in ["plimsoll_device_allocs_after_ready_total", "plimsoll_high_water_above_proof_total"]:
        if rise := record.since(name):
            found.append(f"device memory grows: {name} rose by {rise:.0f}")
    for name in ["process_open_fds", "process_threads"]:
        start, end = record.before.sum(name), record.after.sum(name)
        if end > start + SLACK:
            found.append(f"{name} grows: {start:.0f} at the start, {end:.0f} at the end")
    return found


def lost(record: Record) -> list[str]:
    found = []
    ledger = record.ledger
    if ledger.defect_count:
        found.append(f"wrong answers: {ledger.defect_count}, such as {ledger.defects[0]}")
    submitted = record.since("plimsoll_requests_submitted_total")
    ends = {name: record.since(name) for name in ENDS}
    if sum(ends.values()) != submitted:
        found.append(f"lost requests: {submitted:.0f} were admitted, and {ends} ended")
    under_vllm = record.since("vllm:request_success_total")
    if under_vllm != submitted:
        found.append(f"counters disagree: vllm:request_success_total rose by {under_vllm:.0f}, {submitted:.0f} were admitted")
    # What clients saw, the server has counted; more it has counted only for those who did not look.
    counted = record.after.by("plimsoll_http_requests_total", "code")
    earlier = record.before.by("plimsoll_http_requests_total", "code")
    for code in sorted({*counted, *ledger.codes}):
        told, seen = counted.get(code, 0) - earlier.get(code, 0), ledger.codes[code]
        if code != "499" and told < seen:
            found.append(f"counters disagree: clients saw {seen} answers with {code}, the server counted {told:.0f}")
        if code.startswith("5") and told > seen + ledger.unseen:
            found.append(f"server errors: {told:.0f} answers with {code}, of which clients know {seen}")
    # A 503 is a sleep's, a 504 a deadline's.
    errors = record.since("plimsoll_http_requests_total", code="500")
    if not record.injects and (errors or record.since("plimsoll_steps_failed_total")):
        found.append(f"server errors: {errors:.0f}, although nothing was told to go wrong")
    if record.since("plimsoll_requests_failed_total") and not record.since("plimsoll_steps_failed_total") and not ledger.total(LATE):
        found.append("counters disagree: requests failed, and no step did")
    return found


def health(record: Record) -> list[str]:
    found = []
    if record.died:
        found.append(f"the server ended by itself with exit code {record.exit_code}")
    if not record.ready:
        found.append("the server is not ready at the end")
    for word in ["panicked", "PANIC", "engine is dead"]:
        if at := record.log.find(word) + 1:
            found.append(f"the log tells of a defect: {record.log[max(at - 200, 0):at + 300]}")
            break
    taken = [seconds for _, seconds in record.ledger.latencies]
    if (p99 := quantile(taken, 0.99)) > record.latency_bound:
        found.append(f"the neighbour's latency: p99 of {len(taken)} is {p99:.2f} s, more than {record.latency_bound} s")
    if record.exit_code and not record.died:
        found.append(f"the drain ended with exit code {record.exit_code}")
    if dropped := [outcome for outcome in record.drained if outcome != COMPLETE]:
        found.append(f"the drain dropped {len(dropped)} of {len(record.drained)} requests: {dropped[0]}")
    return found


def missed(record: Record) -> list[str]:
    """What did not happen and must have, or the soak says little."""
    outcomes, since = record.ledger.outcomes, record.since
    goals = {f"an answer of {name}": outcomes[name][COMPLETE] for name in ENDPOINTS}
    goals |= {
        "preemptions": since("plimsoll_preemptions_total", cause="kv_full"),
        "prefix cache hits": since("plimsoll_prefix_cache_hits_total"),
        "evictions": since("plimsoll_prefix_cache_evictions_total"),
        "cancelled requests": since("plimsoll_requests_cancelled_total"),
        "clients that hung up": outcomes["hang_up"].total(),
        "clients that were killed": outcomes["killed"].total(),
        "stopped clients that were cut off": outcomes["stopped"][CUT],
        "slow readers that heard all": outcomes["slow_reader"][COMPLETE],
        "malformed requests": outcomes["malformed"][REFUSED],
        "prompts that are too large": outcomes["too_large"][REFUSED],
        "requests that were refused": record.ledger.codes["429"],
        "requests whose time was over": record.ledger.total(LATE),
        "sleeps": outcomes["sleep"][COMPLETE],
        "the neighbour's answers": len(record.ledger.latencies) >= 20,
        "two quiet moments": len(record.quiet) >= 2,
    }
    if record.injects:
        goals |= {
            "failed steps": since("plimsoll_steps_failed_total"),
            "states that were lost and built again": since("plimsoll_engine_rebuilds_total", reason="oom"),
        }
    return [name for name, reached in goals.items() if not reached]


def missed_vectors(record: Record) -> list[str]:
    """The same for a server of embeddings."""
    goals = {"embeddings": record.ledger.outcomes["embeddings"][COMPLETE], "two quiet moments": len(record.quiet) >= 2}
    return [name for name, reached in goals.items() if not reached]

