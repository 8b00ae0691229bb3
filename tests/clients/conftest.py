"""Servers for the clients' tests: the fixtures of tests/http, whose packages are others."""

import importlib.util
from pathlib import Path

import pytest

HTTP = Path(__file__).resolve().parents[1] / "http"
spec = importlib.util.spec_from_file_location("http_fixtures", HTTP / "conftest.py")
fixtures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fixtures)

start, sim, smollm2 = fixtures.start, fixtures.sim, fixtures.smollm2


@pytest.fixture(scope="session")
def embedder(start):
    """The simulated model, served for embeddings."""
    with start("sim", "--runner", "pooling", "--served-model-name", "embedder") as server:
        yield server
