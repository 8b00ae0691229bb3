"""What became of every request: each client writes down one outcome for each that it sends."""

import collections
import json
from dataclasses import dataclass, field

# What a client may see of a request. Anything else is a defect, and is kept with what led to it.
COMPLETE = "complete"
REFUSED = "refused"
FAILED = "failed"
LATE = "late"
LEFT = "left"
CUT = "cut"
WRONG = "wrong"

# Messages and codes of what the soak itself makes go wrong.
INJECTED = "injected"
OUTAGES = {"out_of_memory", "rebuilding", "sleeping"}
TIME_OVER = "did not finish within its timeout"
DEFECTS_KEPT = 20


@dataclass
class Ledger:
    """Outcomes by workload, HTTP status codes that clients saw, and what was wrong."""

    outcomes: dict = field(default_factory=lambda: collections.defaultdict(collections.Counter))
    # Of responses whose head a client saw.
    codes: collections.Counter = field(default_factory=collections.Counter)
    # Requests of which nobody knows whether the server answered them: the client left first, or sent what is no HTTP.
    unseen: int = 0
    defects: list = field(default_factory=list)
    defect_count: int = 0
    # (when, seconds) of what a well-behaved neighbour asked for and got.
    latencies: list = field(default_factory=list)

    def note(self, workload: str, outcome: str, detail: str = "") -> None:
        self.outcomes[workload][outcome] += 1
        if outcome == WRONG:
            self.defect_count += 1
            if len(self.defects) < DEFECTS_KEPT:
                self.defects.append(f"{workload}: {detail}")

    def saw(self, status: int) -> None:
        self.codes[str(status)] += 1

    def left(self, workload: str) -> None:
        self.unseen += 1
        self.note(workload, LEFT)

    def total(self, outcome: str) -> int:
        return sum(counts[outcome] for counts in self.outcomes.values())

    def requests(self) -> int:
        return sum(sum(counts.values()) for counts in self.outcomes.values())


def parse_error(body: bytes) -> dict | None:
    """The error in a body, of either API's shape; `None` where it is none."""
    try:
        error = json.loads(body)["error"]
        return error if error["message"] and error["type"] else None
    except (ValueError, KeyError, TypeError):
        return None


def judge(status: int, error: dict | None, retry_after: str | None, may_be_late: bool) -> tuple[str, str]:
    """The outcome that an error is, and what is wrong about it if something is. In the middle of a stream, status is 200."""
    if error is None:
        return WRONG, f"status {status} without an error in its body"
    told = f"status {status}: {error}"
    message = error["message"]
    if status in (200, 500) and message.endswith(INJECTED):
        return FAILED, told
    # Anthropic's shape has no codes.
    if status == 503 and error.get("code", "rebuilding") in OUTAGES or status == 200 and "device memory" in message:
        return FAILED, told
    if status in (200, 504) and TIME_OVER in message and may_be_late:
        return LATE, told
    if status == 429:
        return (REFUSED, told) if retry_after else (WRONG, f"{told}, without Retry-After")
    return WRONG, told
