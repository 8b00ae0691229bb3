"""`plimsoll selftest` on the default model: real weights, a KV cache that is really full."""

import json
import subprocess

import pytest
from conftest import BINARY, PATIENCE, SMOLLM2

NOTHING_TO_TEST = 9
INCONCLUSIVE = 10


def selftest(server, seconds: int) -> tuple[int, dict, str]:
    """Exit code, verdict, and what people read."""
    command = [BINARY, "selftest", "--url", server.url, "--duration", f"{seconds}s"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE + 2 * seconds)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(("model", "full"), [(str(SMOLLM2), 0.95), ("sim:0.005,window=40", 0.8)])
def test_the_limits_that_were_proved_hold(start, model, full):
    """With windows of less than a few blocks, four rows are not sure to hold all of the cache at once. As often as a debug build on a busy machine needs to be seen full, with the time that the verdict itself says is enough."""
    limits = ["--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
    with start(model, "--served-model-name", "model", *limits, "--max-total-token-num", "384") as server:
        seconds = 15
        for _ in range(4):
            code, verdict, table = selftest(server, seconds)
            reached = {goal["limit"]: goal["reached"] for goal in verdict["goals"]}
            if code != INCONCLUSIVE and reached["KV cache in use"] >= full:
                break
            seconds = verdict.get("suggested_duration", seconds)
        assert code == 0, table + server.tail()
        assert verdict["selftest"] == "passed" and verdict["findings"] == []
        assert verdict["device_allocs_after_ready"] == 0 and verdict["kv_blocks_at_end"] == 0
        assert reached["rows at once"] == 4 and reached["KV cache in use"] >= full and reached["full length"] >= 1


def test_a_server_with_keys_is_told_one(start, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# of the team\nteam open-sesame\n")
    with start("sim", "--api-key-file", keys) as server:
        for program in [["selftest", "--duration", "1s", "--url", server.url], ["bench", "serve", "--num-prompts", "2", "--base-url", server.url]]:
            refused = subprocess.run([BINARY, *program], capture_output=True, text=True, timeout=PATIENCE)
            assert refused.returncode in (1, NOTHING_TO_TEST) and "401" in refused.stderr, refused
            told = subprocess.run([BINARY, *program, "--api-key-file", keys], capture_output=True, text=True, timeout=PATIENCE)
            assert told.returncode in (0, INCONCLUSIVE), told
            assert "sesame" not in told.stdout + told.stderr + refused.stderr
