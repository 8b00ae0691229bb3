"""Servers for the clients' tests: the fixtures of tests/http, whose packages are others."""

import importlib.util
from pathlib import Path

HTTP = Path(__file__).resolve().parents[1] / "http"
spec = importlib.util.spec_from_file_location("http_fixtures", HTTP / "conftest.py")
fixtures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fixtures)

start, sim, smollm2 = fixtures.start, fixtures.sim, fixtures.smollm2
