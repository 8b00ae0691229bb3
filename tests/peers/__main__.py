"""Run vLLM's own tests of its API against our server: `python tests/peers [--fast] [--rewrite] [FILE...]`.

The tests are those of two versions of vLLM, which scripts/fetch-test-data fetches. Those that do not pass are listed in expected.json with
the reason; the run fails if another one does not pass, or a listed one does. `--rewrite` writes the list and the table in docs/api.md anew.
"""

import argparse
import collections
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import expected as lists
import suite

HERE = Path(__file__).resolve().parent
FAST = ("sim", "sim-embeddings", "scripted")
# More than all of them take on a busy machine.
TIMEOUT = 3600


def arguments():
    parser = argparse.ArgumentParser(prog="tests/peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="only what takes a minute: most files that are run with the simulated model")
    parser.add_argument("--rewrite", action="store_true", help="write expected.json and the table in docs/api.md as they would have to be")
    parser.add_argument("--version", choices=suite.VERSIONS, action="append", help="only the tests of this version")
    parser.add_argument("file", nargs="*", help="only files that match this pattern, such as '*/test_basic.py'")
    return parser.parse_args()


def begin(version, files, directory):
    """The run of one version's files; its output and report are in `directory`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PLIMSOLL_")}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PEERS_MODELS": json.dumps(files),
        "PEERS_REPORT": str(directory / f"{version}.json"),
    }
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-p", "plugin", "-p", "no:cacheprovider", "--quiet"]
    command += ["-W", "ignore", "-o", "asyncio_default_fixture_loop_scope=function", "--continue-on-collection-errors", "--tb=short"]
    command += ["--extended"] if any(file.startswith("tool_use/") for file in files) else []
    with (directory / f"{version}.log").open("wb") as log:
        words = [*command, *(f"tests/{file}" for file in files)]
        return subprocess.Popen(words, cwd=suite.root(version), env=environment, stdout=log, stderr=subprocess.STDOUT)


def main():
    given = arguments()
    versions = given.version or suite.VERSIONS
    for version in versions:
        if not suite.root(version).exists():
            sys.exit(f"{suite.root(version)} does not exist: run scripts/fetch-test-data")
    chosen = lambda file, model: model and (not given.fast or model in FAST and file not in suite.SLOW) and (
        not given.file or any(fnmatch.fnmatch(file, pattern) for pattern in given.file)
    )
    files = {
        version: {file: model for file, (model, _) in suite.files(version).items() if chosen(file, model)} for version in versions
    }
    expected, problems = lists.load(), [f"no file matches {pattern!r} of suite.py" for pattern in suite.unused()]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        running = {version: begin(version, files[version], directory) for version in versions if files[version]}
        try:
            for process in running.values():
                process.wait(TIMEOUT)
        finally:
            for process in running.values():
                process.kill()
        for version in running:
            report = directory / f"{version}.json"
            if not report.exists():
                sys.exit(f"the run of {version} broke off:\n{(directory / f'{version}.log').read_text()[-4000:]}")
            if running[version].returncode not in (0, 1):
                problems.append(f"the run of {version} broke off:\n{(directory / f'{version}.log').read_text()[-4000:]}")
            result = json.loads(report.read_text())
            collected, outcomes = result["collected"], result["outcomes"]
            passed = sum(outcome["outcome"] == "passed" for outcome in outcomes.values())
            print(f"vLLM {version}: {passed} of {len(collected)} tests in {len(files[version])} files pass")
            seconds = collections.Counter()
            for test, outcome in outcomes.items():
                seconds[test.split("::")[0]] += outcome["seconds"]
            print("  slowest:", ", ".join(f"{file} {time:.0f} s" for file, time in seconds.most_common(6)))
            problems += [f"{file} cannot be read: run it, or leave it out in suite.py: {why[-600:]}" for file, why in result["unread"].items()]
            if given.rewrite:
                lists.rewrite(expected, version, files[version], collected, outcomes)
            problems += lists.unknown(expected, version, collected, files[version])
            problems += lists.complaints(expected, version, collected, outcomes)
    if given.rewrite:
        lists.save(expected)
    elif lists.DOCS.read_text() != lists.with_table(expected):
        problems.append("the table in docs/api.md is not that of expected.json: run tests/peers --rewrite")
    print(f"in {time.monotonic() - began:.0f} s")
    if problems:
        sys.exit("\n".join(problems) + f"\n{len(problems)} problems; `python tests/peers --rewrite` updates the list")


if __name__ == "__main__":
    main()
