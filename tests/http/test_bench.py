"""scripts/bench-h200 on a model of two small layers: every line of its table is measured, with or without a GPU."""

import json
import os
import subprocess

from conftest import BINARY, ROOT

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 1000,
    "bos_token_id": 998,
    "eos_token_id": 999,
}


def test_every_line_of_the_table_is_measured(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    few = ["--num-prompts", "4", "--num-iters", "1", "--batch-sizes", "1", "3", "--load", "2:4", "--selftest-seconds", "4",
           "--shapes", "--long-prompt", "600", "--mixed-context", "1536", "--mixed-prompts", "6", "--burst", "5", "--start-context", "2048"]
    sizes = ["--model-config", config, "--plimsoll-args", "--device-memory 1GiB", "--output", tmp_path / "out"]
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_VENV"}
    # Servers outside these tests need not wait for ours, nor ours for them.
    environment["PLIMSOLL_DEVICE_LOCK_DIR"] = str(tmp_path)
    command = [ROOT / "scripts/bench-h200", "--plimsoll", BINARY, *few, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 at once" in done.stdout
    lines = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "out").iterdir()}
    assert lines.keys() == {"latency-1", "latency-3", "throughput", "prompt-600", "serve-2", "chats-32", "half-load", "burst-5",
                             "start", "kv-default", "kv-full", "start-measured", "start-cached", "long-first", "long-planned", "selftest",
                             *(f"grammar-{kind}-{batch}" for kind in ("free", "json") for batch in (1, 32, 256))}
    for name, line in lines.items():
        assert line["figures"] and all(figure["plimsoll"] > 0 for figure in line["figures"]), name
        assert line["version"].startswith("plimsoll ") and line["plimsoll"]["command"], name
    assert lines["serve-2"]["plimsoll"]["completed"] == 4
    for name, requests in ("chats-32", 6), ("half-load", 6), ("burst-5", 5):
        assert lines[name]["plimsoll"]["completed"] == requests, name
    assert lines["latency-1"]["figures"][0]["target"] == 3.95
    for name in "latency-1", "latency-3", "throughput", "prompt-600", "serve-2":
        assert lines[name]["figures"][0]["floor"] > 0, name
    for first, second in ("start-measured", "start-cached"), ("long-first", "long-planned"):
        assert [lines[name]["plimsoll"]["profile"]["origin"]["from"] for name in (first, second)] == ["measured", "cached"]
    first, planned = ({figure["figure"] for figure in lines[name]["figures"]} for name in ("long-first", "long-planned"))
    assert {"s", "probe s", "rebuild s", "validate s"} <= first and "probe s" not in planned
    verdict = lines["selftest"]["plimsoll"]
    assert verdict["selftest"] != "failed" and verdict["device_allocs_after_ready"] == 0, verdict["findings"]
