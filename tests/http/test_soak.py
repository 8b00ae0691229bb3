"""The soak can fail: each of its invariants, on a record that breaks it and on one that does not."""

import dataclasses
import runpy
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[1] / "soak"
sys.path.insert(0, str(SOAK))

from invariants import Record, broken, missed  # noqa: E402
from ledger import COMPLETE, FAILED, LATE, REFUSED, WRONG, Ledger, judge, parse_error  # noqa: E402
from target import Page  # noqa: E402

MIB = 1 << 20
AFTER = {
    'plimsoll_kv_blocks{state="total"}': 100, 'plimsoll_kv_blocks{state="used"}': 0, 'plimsoll_kv_blocks{state="cached"}': 60,
    "plimsoll_requests_in_flight": 0, "plimsoll_requests_running": 0, "plimsoll_requests_waiting": 0, "plimsoll_kv_tail_tokens": 0,
    "plimsoll_http_requests_in_flight": 1, 'plimsoll_device_memory_bytes{component="kv"}': 1000, "plimsoll_steps_failed_total": 2,
    "plimsoll_device_allocs_after_ready_total": 0, "plimsoll_high_water_above_proof_total": 0,
    "process_open_fds": 12, "process_threads": 9, "plimsoll_requests_submitted_total": 10,
    'plimsoll_requests_finished_total{finished_reason="stop"}': 5, 'plimsoll_requests_finished_total{finished_reason="length"}': 2,
    "plimsoll_requests_cancelled_total": 2, "plimsoll_requests_failed_total": 1,
    'vllm:request_success_total{finished_reason="stop"}': 7, 'vllm:request_success_total{finished_reason="abort"}': 3,
    'plimsoll_http_requests_total{code="200",route="/v1/completions"}': 8, 'plimsoll_http_requests_total{code="500"}': 1,
}
BEFORE = {name: 0 for name in AFTER} | {
    'plimsoll_device_memory_bytes{component="kv"}': 1000, "process_open_fds": 10, "process_threads": 8}


def page(values: dict) -> Page:
    return Page("".join(f"{name} {value}\n" for name, value in values.items()))


def record(**changes) -> Record:
    ledger = Ledger()
    ledger.codes.update({"200": 7, "500": 1})
    ledger.unseen = 1
    whole = Record(ledger=ledger, before=page(BEFORE), after=page(AFTER), quiet=[160 * MIB, 161 * MIB], drained=[COMPLETE] * 3)
    return dataclasses.replace(whole, **changes)


def after(**changes) -> Page:
    return page(AFTER | changes)


def ledger_with(outcome: str) -> Ledger:
    ledger = record().ledger
    ledger.note("chat", outcome, "something")
    return ledger


def test_a_good_record_passes():
    assert broken(record()) == []


@pytest.mark.parametrize("what, bad", [
    ("leaked blocks: 3 of 100", record(after=after(**{'plimsoll_kv_blocks{state="used"}': 3}))),
    ("leaked blocks: 101 cached", record(after=after(**{'plimsoll_kv_blocks{state="cached"}': 101}))),
    ("leaked blocks", record(after=after(plimsoll_kv_tail_tokens=5))),
    ("lost requests: plimsoll_requests_in_flight is 1", record(after=after(plimsoll_requests_in_flight=1))),
    ("lost requests: 2 HTTP", record(after=after(plimsoll_http_requests_in_flight=2))),
    ("lost requests: 11 were admitted", record(
        after=after(plimsoll_requests_submitted_total=11, **{'vllm:request_success_total{finished_reason="stop"}': 8}))),
    ("lost requests: 10 were admitted", record(after=after(plimsoll_requests_cancelled_total=1))),
    ("vllm:request_success_total rose by 8", record(after=after(**{'vllm:request_success_total{finished_reason="stop"}': 5}))),
    ("clients saw 7 answers with 200, the server counted 6", record(
        after=after(**{'plimsoll_http_requests_total{code="200",route="/v1/completions"}': 6}))),
    ("server errors: 3 answers with 500", record(after=after(**{'plimsoll_http_requests_total{code="500"}': 3}))),
    ("although nothing was told to go wrong", record(injects=False)),
    ("requests failed, and no step did", record(after=after(plimsoll_steps_failed_total=0))),
    ("device memory grows: 1000 bytes at the start, 1001", record(
        after=after(**{'plimsoll_device_memory_bytes{component="kv"}': 1001}))),
    ("plimsoll_device_allocs_after_ready_total rose by 1", record(after=after(plimsoll_device_allocs_after_ready_total=1))),
    ("process_open_fds grows: 10 at the start, 15", record(after=after(process_open_fds=15))),
    ("process_threads grows", record(after=after(process_threads=13))),
    ("wrong answers: 1, such as chat: something", record(ledger=ledger_with(WRONG))),
    ("ended by itself", record(died=True)),
    ("not ready", record(ready=False)),
    ("the log tells of a defect", record(log="thread 'x' panicked at y")),
    ("exit code 6", record(exit_code=6)),
    ("the drain dropped 1 of 2", record(drained=[COMPLETE, WRONG])),
])
def test_each_invariant_can_break(what, bad):
    found = broken(bad)
    assert len(found) == 1 and what in found[0], found


def test_memory_that_grows_is_found_and_bursts_are_not():
    assert "host memory grows: 160.0, 185.0 MiB" in broken(record(quiet=[160 * MIB, 185 * MIB]))[0]
    # Of a large process, a part.
    assert "host memory grows" in broken(record(quiet=[1600 * MIB, 1690 * MIB]))[0]
    # What creeps from round to round, too.
    assert "160.0, 168.0, 176.0, 185.0 MiB" in broken(record(quiet=[mib * MIB for mib in [160, 168, 176, 185]]))[0]
    for quiet in [160, 183], [160, 90], [1600, 1670]:
        assert broken(record(quiet=[mib * MIB for mib in quiet], resident=[900 * MIB])) == []
    # Too short to say: inconclusive, not fine.
    assert "two quiet moments" in missed(record(quiet=[160 * MIB]))


def test_memory_is_looked_at_every_quarter_of_an_hour():
    rounds = runpy.run_path(str(SOAK / "__main__.py"))["rounds"]
    assert rounds(600) == [150, 450]
    assert rounds(4500) == [900, 900, 900, 900, 900]
    assert rounds(4000) == [900, 775, 775, 775, 775]


def test_a_neighbour_that_waits_is_found():
    slow = record()
    slow.ledger.latencies = [(0, 0.1)] * 95 + [(0, 30.0)] * 5
    assert "p99 of 100 is 30.00 s" in broken(slow)[0]
    slow.ledger.latencies = [(0, 0.1)] * 999 + [(0, 30.0)]
    assert broken(slow) == []


def test_a_soak_in_which_nothing_happened_is_inconclusive():
    goals = missed(record(after=after(plimsoll_steps_failed_total=0)))
    assert {"preemptions", "an answer of chat", "failed steps", "sleeps", "clients that were killed"} <= set(goals)
    assert "failed steps" not in missed(record(after=after(plimsoll_steps_failed_total=0), injects=False))


@pytest.mark.parametrize("status, message, code, retry_after, outcome", [
    (500, "the step failed: injected", "step_failed", None, FAILED),
    (500, "the step failed: two requests write block 7", "step_failed", None, WRONG),
    (500, "internal error: a handler panicked", "internal_error", None, WRONG),
    (503, "device memory ran out", "rebuilding", "1", FAILED),
    (503, "the engine is dead", "engine_dead", None, WRONG),
    (200, "the step failed: injected", "step_failed", None, FAILED),
    (200, "the step panicked: index out of bounds", "step_failed", None, WRONG),
    (429, "the server is at its limit", "queue_full", "1", REFUSED),
    (429, "the server is at its limit", "queue_full", None, WRONG),
    (504, "the request did not finish within its timeout (1.0 s after its arrival)", "deadline_exceeded", None, LATE),
    (400, "max_tokens must be positive", None, None, WRONG),
])
def test_what_an_error_means(status, message, code, retry_after, outcome):
    error = {"message": message, "type": "server_error", "code": code}
    assert judge(status, error, retry_after, may_be_late=True)[0] == outcome


def test_only_errors_are_errors():
    assert parse_error(b'{"error": {"message": "m", "type": "t"}}') == {"message": "m", "type": "t"}
    for other in [b"", b"[]", b"null", b'{"error": null}', b'{"error": {"message": "", "type": "t"}}', b"<html>"]:
        assert parse_error(other) is None
    assert judge(500, None, None, True)[0] == WRONG
