"""The tests of vLLM that do not pass, and why: `expected.json`, the table in docs/api.md that is made of it, and what a run says of it."""

import collections
import json
import re
import sys
from pathlib import Path

import suite

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("expected.json")
DOCS = ROOT / "docs/api.md"
BEGIN, END = "<!-- made by tests/peers -->\n", "<!-- end of what tests/peers made -->\n"
KINDS = {
    "purpose": "another answer on purpose",
    "missing": "not supported",
    "model": "needs another model",
    "insides": "looks at vLLM's own code",
    "gap": "known gap",
}


def load():
    return json.loads(FILE.read_text())


def save(expected):
    """Write the list, without reasons that no test has, and the table."""
    expected["reasons"] = [reason for reason in expected["reasons"] if reason["tests"]]
    FILE.write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")
    DOCS.write_text(with_table(expected))


def function(test):
    return test.split("[")[0]


def listed(reason, version, collected):
    """The tests of a reason: an entry without parameters stands for the test with all of them."""
    entries = set(reason["tests"].get(version, ()))
    return {test for test in collected if test in entries or function(test) in entries}


def complaints(expected, version, collected, outcomes):
    """What a run says against the list."""
    reasons = collections.defaultdict(list)
    for reason in expected["reasons"]:
        entries = collections.Counter()
        for test in listed(reason, version, collected):
            reasons[test].append(reason["why"])
            entries[test if test in reason["tests"][version] else function(test)] += 1
        for entry, number in entries.items():
            if number != reason["tests"][version][entry]:
                yield f"{entry} are {number} tests, not {reason['tests'][version][entry]}"
        if not reason["why"] or reason["kind"] not in KINDS:
            yield f"a reason of expected.json has no `why`, or a `kind` that is not one of {', '.join(KINDS)}: {reason}"
    flaky = {test for reason in expected["reasons"] if reason.get("sometimes") for test in listed(reason, version, collected)}
    for test in collected:
        outcome = outcomes.get(test, {"outcome": "not run", "error": ""})
        if len(reasons[test]) > 1:
            yield f"{test} is listed twice: {reasons[test]}"
        if test in flaky:
            continue
        if outcome["outcome"] == "passed" and reasons[test]:
            yield f"{test} passes, but is listed: {reasons[test][0]}"
        if outcome["outcome"] != "passed" and not reasons[test]:
            yield f"{test} {outcome['outcome']}: {outcome['error'][-1500:]}"


def unknown(expected, version, collected, files):
    """Entries of the list for tests of these files that do not exist."""
    known = set(collected) | set(map(function, collected))
    for reason in expected["reasons"]:
        for entry in reason["tests"].get(version, ()):
            if entry.split("::")[0] in files and entry not in known:
                yield f"{entry} is listed, but there is no such test"


def rewrite(expected, version, files, collected, outcomes):
    """Put each test of these files that does not pass under its reason: the one it has, or the first whose `error` is found in the
    test's name and error, or one without a `why`, which somebody has to fill in."""
    if not_run := [test for test in collected if test not in outcomes]:
        sys.exit(f"{len(not_run)} tests of {version} did not run, from {not_run[0]} on: nothing is written")
    new = {"why": "", "kind": "", "error": "", "tests": {}}
    before = {test: reason for reason in expected["reasons"] for test in listed(reason, version, collected)}
    groups = collections.defaultdict(list)
    for test in collected:
        outcome = outcomes.get(test, {"outcome": "not run", "error": ""})
        reason = before.get(test)
        if outcome["outcome"] == "passed" and not (reason and reason.get("sometimes")):
            continue
        if reason is None:
            text = f"{test} {outcome['error']}"
            fits = (each for each in expected["reasons"] if each["error"] and re.search(each["error"], text, re.S))
            reason = next(fits, new)
            if reason is new:
                print(f"no reason is known: {test}: {outcome['error'][:300]}")
        groups[id(reason)].append(test)
    if id(new) in groups:
        expected["reasons"].append(new)
    for reason in expected["reasons"]:
        kept = {entry: n for entry, n in reason["tests"].get(version, {}).items() if entry.split("::")[0] not in files}
        tests = {**kept, **compressed(groups[id(reason)], collected)}
        reason["tests"].pop(version, None)
        if tests:
            reason["tests"][version] = dict(sorted(tests.items()))
    counts = dict(collections.Counter(test.split("::")[0] for test in collected))
    old = expected["tests"].get(version, {})
    expected["tests"][version] = dict(sorted({**{file: n for file, n in old.items() if file not in files}, **counts}.items()))


def compressed(tests, collected):
    """The same as entries, each with its number of tests: one for a function if all of its tests are meant."""
    wanted = collections.Counter(map(function, tests))
    whole = collections.Counter(map(function, collected))
    return collections.Counter(function(test) if wanted[function(test)] == whole[function(test)] else test for test in tests)


def count(reason, version):
    return sum(reason["tests"].get(version, {}).values())


def table(expected):
    """What docs/api.md says."""
    lines = ["| " + " | ".join(["", *(f"vLLM {version}" for version in suite.VERSIONS)]) + " |", "|---" * (1 + len(suite.VERSIONS)) + "|"]
    row = lambda text, *cells: lines.append("| " + " | ".join([text, *(str(cell or "") for cell in cells)]) + " |")
    totals = {version: sum(expected["tests"][version].values()) for version in suite.VERSIONS}
    missed = {version: sum(count(reason, version) for reason in expected["reasons"]) for version in suite.VERSIONS}
    row("**pass**", *(totals[version] - missed[version] for version in suite.VERSIONS))
    for kind, text in KINDS.items():
        for reason in sorted((each for each in expected["reasons"] if each["kind"] == kind), key=lambda each: each["why"]):
            row(f"{text}: {reason['why']}", *(count(reason, version) for version in suite.VERSIONS))
    row("**all tests of the API that are run**", *totals.values())
    left = {why: None for _, why in suite.LEFT_OUT}
    return "\n".join(lines) + f"\n\nFiles that are not run are about: {'; '.join(left)}.\n"


def with_table(expected):
    text = DOCS.read_text()
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n" + table(expected) + "\n" + END + rest.split(END)[1]
