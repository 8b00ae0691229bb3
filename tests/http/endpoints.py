"""Every endpoint that takes a body, with requests that it accepts: the one list that tests of bad input start from."""

import json
from pathlib import Path

# A path to requests that the simulated model answers with 200. Together they use as many fields as they can, since only
# what is here is mutated; crates/server/tests/api/fuzz.rs reads it too.
EVERY = json.loads(Path(__file__).with_name("requests.json").read_text())
# Those of a server of embeddings (`--runner pooling`), which has no other endpoint of its own.
EMBEDDINGS = {path: bodies for path, bodies in EVERY.items() if path.endswith(("/embeddings", "/rerank", "/score"))}
VALID = {path: bodies for path, bodies in EVERY.items() if path not in EMBEDDINGS}
