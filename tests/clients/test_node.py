"""The official `openai` package for Node.js; the tests are tests/clients/node/openai.test.mjs."""

import os
import shutil
import subprocess
from pathlib import Path

NODE = Path(__file__).resolve().parent / "node"


def test_openai_for_node(sim, smollm2, embedder):
    assert shutil.which("node"), "there is no Node.js: install 20 or newer"
    environment = os.environ | {
        "SIM_URL": f"{sim.url}/v1",
        "SMOLLM2_URL": f"{smollm2.url}/v1",
        "EMBEDDER_URL": f"{embedder.url}/v1",
    }
    done = subprocess.run(
        ["node", "--test", "--test-reporter=spec"], cwd=NODE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "\nℹ pass 0\n" not in done.stdout and "\nℹ fail 0\n" in done.stdout, done.stdout
    sim.wait_until_empty()
