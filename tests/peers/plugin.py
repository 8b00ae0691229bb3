"""Runs vLLM's tests of its API against our server; the suite of one version is a pytest run of its own, with this plugin."""

import inspect
import json
import os
from pathlib import Path

import pytest

import servers
import stand_in

# The model of each file.
MODELS = json.loads(os.environ["PEERS_MODELS"])
outcomes = {}
unread = {}


# Before pytest reads the tests' own conftest.py.
stand_in.install(Path.cwd())


@pytest.fixture
def run_with_both_engines():
    """vLLM once had two."""


def name_of(item):
    """`entrypoints/openai/test_basic.py::test_x[y]`."""
    return item.nodeid.removeprefix("tests/")


def starts_server(function):
    try:
        return "RemoteOpenAIServer(" in inspect.getsource(function)
    except (OSError, TypeError):
        return False


def uses_server(item):
    """Whether the test, or a fixture that it needs, starts a server: the others test vLLM's insides."""
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return starts_server(item.obj) or any(starts_server(each[-1].func) for each in definitions)


def pytest_collection_modifyitems(config, items):
    inside = [item for item in items if not uses_server(item)]
    config.hook.pytest_deselected(items=inside)
    items[:] = [item for item in items if item not in inside]
    stand_in.collecting = False


def pytest_collectreport(report):
    if report.failed:
        unread[report.nodeid.removeprefix("tests/")] = str(report.longrepr)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    servers.model = MODELS[name_of(item).split("::")[0]]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    # Fixtures of the module are torn down after its last test, whatever that was about.
    if report.when != "teardown" or report.failed:
        name = name_of(item)
        outcome = "failed" if report.failed else report.outcome
        if outcomes.get(name, {}).get("outcome", "passed") == "passed":
            said = str(call.excinfo.value) if call.excinfo else ""
            if report.skipped and isinstance(report.longrepr, tuple):
                said = report.longrepr[2]
            kind = call.excinfo.typename if call.excinfo else ""
            seconds = outcomes.get(name, {}).get("seconds", 0) + report.duration
            outcomes[name] = {"outcome": outcome, "error": f"{kind}: {said}" if kind else "", "seconds": seconds}
    return report


def pytest_sessionfinish(session):
    servers.close()
    report = {"collected": [name_of(item) for item in session.items], "outcomes": outcomes, "unread": unread}
    Path(os.environ["PEERS_REPORT"]).write_text(json.dumps(report))
