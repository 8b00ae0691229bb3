"""A server for agents: the fixtures of tests/http."""

import importlib.util
from pathlib import Path

import pytest

HTTP = Path(__file__).resolve().parents[1] / "http"
spec = importlib.util.spec_from_file_location("http_fixtures", HTTP / "conftest.py")
fixtures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fixtures)

start = fixtures.start


@pytest.fixture(scope="session")
def sim(start):
    """It says what a prompt's last `<say>text</say>` holds. Agents begin with tens of thousands of tokens, here a byte each."""
    names = ["claude-sonnet-4-5", "claude-haiku-4-5-20251001"]
    with start("sim", "--max-model-len", "200000", "--tool-call-parser", "hermes", "--served-model-name", *names) as server:
        yield server
