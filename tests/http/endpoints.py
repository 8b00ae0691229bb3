"""Every endpoint that takes a body, with requests that it accepts: the one list that tests of bad input start from."""

import json
from pathlib import Path

# A path to requests that the simulated model answers with 200, those of POOLING with `--runner pooling`. Together they use as many fields as they can, since only
# what is here is mutated; crates/server/tests/api/fuzz.rs reads it too.
VALID = json.loads(Path(__file__).with_name("requests.json").read_text())

# The same of a server of embeddings, which has no other endpoint of its own.
EMBEDDINGS = {
    "/v1/embeddings": [
        {"model": "embedder", "input": "abc", "user": "u"},
        {"input": ["abc", "de"], "encoding_format": "base64", "dimensions": 7, "add_special_tokens": False},
        {"input": [[97, 98], [99]], "encoding_format": "float", "truncate_prompt_tokens": 1},
        {"input": [97, 98], "truncate_prompt_tokens": -1},
    ]
}
POOLING = {"/v1/embeddings"}
