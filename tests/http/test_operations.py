"""What operators are given: alerts, dashboard and runbooks, against the metrics of a running server."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import conftest
import moe_model
import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "config/prometheus/alerts.yml"
DASHBOARD = ROOT / "config/grafana/plimsoll.json"
# Where there is no GPU, these are not on the page.
OF_A_GPU = {"plimsoll_gpu_busy_seconds_total", "plimsoll_gpu_idle_seconds_total"}
# And where the model has no experts, these.
OF_EXPERTS = {"plimsoll_expert_imbalance_ratio", "plimsoll_expert_hottest_token_ratio"}
# And where nobody is told of the KV cache, these.
OF_KV_EVENTS = {"plimsoll_kv_event_batches_published_total", "plimsoll_kv_event_batches_dropped_total"}
# And once a server is ready, this.
OF_A_START = {"plimsoll_start_elapsed_seconds"}


@pytest.fixture(scope="module")
def promtool() -> str:
    script = subprocess.run([ROOT / "scripts/install-tool", "promtool", "prometheus"], stdout=subprocess.PIPE, text=True, check=True)
    return script.stdout.strip()


@pytest.fixture(scope="module")
def exported(sim) -> set[str]:
    """Names of the series on the page of a server that has served."""
    sim.openai.completions.create(model="sim", prompt="a", max_tokens=2)
    page = sim.http.get("/metrics").raise_for_status().text
    return {re.match(r"[a-z0-9_:]+", line)[0] for line in page.splitlines() if line and not line.startswith("#")} | OF_A_GPU | OF_EXPERTS | OF_KV_EVENTS | OF_A_START


def rules() -> list[dict]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def named(expression: str) -> set[str]:
    """Metrics that a query names."""
    return set(re.findall(r"\b(?:plimsoll_|vllm:|process_)\w+", expression))


def run(*command) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


def test_alerts_fire_when_they_should(promtool):
    run(promtool, "check", "rules", ALERTS)
    run(promtool, "test", "rules", ALERTS.with_name("alerts_test.yml"))


def test_every_alert_is_tested_and_has_a_runbook():
    tested = yaml.safe_load(ALERTS.with_name("alerts_test.yml").read_text())["tests"]
    fired = {case["alertname"] for test in tested for case in test["alert_rule_test"] if case["exp_alerts"]}
    runbook = (ROOT / "docs/operations.md").read_text()
    for rule in rules():
        assert rule["alert"] in fired
        assert f"\n### {rule['alert']}\n" in runbook
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"
    assert set(re.findall(r"^### (Plimsoll\w+)$", runbook, re.MULTILINE)) == {rule["alert"] for rule in rules()}


def test_every_query_names_metrics_that_are_exported(exported):
    for expression in [rule["expr"] for rule in rules()] + queries():
        assert named(expression) or expression.startswith("up{"), expression
        assert named(expression) <= exported, f"{expression}: not exported: {named(expression) - exported}"


def test_steps_are_compared_with_those_of_the_start(start):
    with start("sim:0.01", "--served-model-name", "sim") as server, ThreadPoolExecutor(4) as pool:
        asks = [{"prompt": str(turn), "max_tokens": 10 + 5 * turn, "ignore_eos": True} for turn in range(8)]
        assert {answer.status_code for answer in pool.map(lambda ask: server.http.post("/v1/completions", json=ask), asks)} == {200}
        for kind in "decode", "mixed":
            actual = server.metric("plimsoll_step_actual_seconds_total", kind=kind)
            # Neither takes less than the model waits in each.
            assert actual > 0.01 and server.metric("plimsoll_step_expected_seconds_total", kind=kind) > 0.01


def test_documented_metrics_are_exported(exported):
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported}
    unknown = named((ROOT / "docs/operations.md").read_text()) - exported - families
    assert not unknown


def test_metrics_are_read_by_the_parser_of_prometheus(sim, promtool):
    """Pickers of the inference gateway use the same, which is Go's."""
    page = sim.http.get("/metrics").raise_for_status().text
    report = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, timeout=conftest.PATIENCE)
    # It was read, and found wanting in style: by names that are vLLM's.
    assert report.returncode == 3, report.stderr
    assert [line for line in report.stderr.splitlines() if not line.startswith("vllm:")] == []


def test_commands_of_the_runbooks_work_as_they_stand(sim, promtool, tmp_path):
    guide = (ROOT / "docs/operations.md").read_text()
    runbooks = guide.split("\n## Runbooks\n")[1].split("\n## ")[0]
    commands = set(re.findall(r"(?:^|`)(curl [^`\n]+)", runbooks, re.MULTILINE))
    assert len(commands) >= 3
    reports = {}
    for command in commands:
        done = subprocess.run(["bash", "-c", command], env=os.environ | {"URL": sim.url}, capture_output=True, text=True)
        assert done.returncode == 0 and "error" not in (report := json.loads(done.stdout)), command + done.stdout + done.stderr
        reports[command.rsplit("/", 1)[1]] = report
    # What they are to be read for is there.
    for path in set(re.findall(r"`((?:now|last_oom)\.\w+)`", runbooks)) - {"last_oom.peers_delta"}:
        assert path.split(".")[1] in reports["memory"]["now"], path
    assert {"step_in_progress_seconds", "reason"} <= reports["ready"].keys() and "last_oom" in reports["memory"]
    expressions = [line for block in re.findall(r"```promql\n(.*?)```", guide, re.DOTALL) for line in block.splitlines()]
    assert len(expressions) >= 5
    check_promql(promtool, tmp_path, expressions)


def check_promql(promtool: str, directory: Path, expressions: list[str]) -> None:
    records = [{"record": f"query:{i}", "expr": expression} for i, expression in enumerate(expressions)]
    file = directory / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": records}]}))
    run(promtool, "check", "rules", file)


def test_dockerfile_is_linted():
    hadolint = Path(sys.executable).with_name("hadolint")
    run(hadolint, "--config", ROOT / ".hadolint.yaml", ROOT / "Dockerfile")


def test_queries_of_the_dashboard_are_promql(promtool, tmp_path):
    # Grafana fills in these two before it asks.
    plain = [re.sub(r"\$__rate_interval", "1m", query).replace("$model", ".*").replace("$instance", ".*") for query in queries()]
    check_promql(promtool, tmp_path, plain)


def test_legends_tell_all_series_apart(start, tmp_path):
    """Two ranks have metrics of memory of their own: one line each, and its name says which."""
    moe_model.write(tmp_path, spread=True)
    with start(str(tmp_path), "-tp", "2", "--max-num-seqs", "4") as server:
        page = server.http.get("/metrics").raise_for_status().text
    labels: dict[str, set[str]] = {}
    for name, pairs in re.findall(r"^(plimsoll_\w+)\{(.*)\} ", page, re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', pairs))
    ranked = {name for name, of in labels.items() if "rank" in of}
    assert "plimsoll_headroom_bytes" in ranked
    shown = set()
    for target in [target for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel.get("targets", [])]:
        expression, legend = target["expr"], target["legendFormat"]
        summed = re.findall(r"\b(?:sum|histogram_quantile)\b(?: by \(([\w, ]+)\))?", expression)
        if summed:
            told = {label for group in summed for label in re.split(r",\s*", group) if label and label != "le"}
        else:
            # Process metrics have no labels of ours; the dashboard chooses models.
            told = {"instance"}.union(*(labels.get(name, set()) for name in named(expression))) - {"model_name", "engine"}
        assert told <= set(re.findall(r"\{\{(\w+)\}\}", legend)), f"{expression}: {legend}"
        if "{{rank}}" in legend:
            shown |= named(expression)
    assert shown <= ranked and len(shown) == 6


def test_dashboard_has_grafanas_schema():
    plugins.register_default_plugins()
    given = json.loads(DASHBOARD.read_text())
    # What Grafana's own types do not know is lost on the way through them.
    parsed = json.loads(JSONEncoder().encode(Dashboard.from_json(given)))
    assert lost(given, parsed) == []
    ids = [panel["id"] for panel in given["panels"]]
    assert len(ids) == len(set(ids))
    taken = set()
    for panel in given["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert place["x"] + place["w"] <= 24 and not cells & taken, f"{panel['title']} overlaps"
        taken |= cells


def lost(given, parsed, path="") -> list[str]:
    """Paths whose value is another in `parsed`, or is not there."""
    if isinstance(given, dict) and isinstance(parsed, dict):
        return [p for key, value in given.items() for p in lost(value, parsed.get(key, "missing"), f"{path}/{key}")]
    if isinstance(given, list) and isinstance(parsed, list) and len(given) == len(parsed):
        return [p for i, pair in enumerate(zip(given, parsed)) for p in lost(*pair, f"{path}/{i}")]
    return [] if given == parsed else [path]
