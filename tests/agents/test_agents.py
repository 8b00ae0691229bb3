"""Real agents, from their packages, on the simulated model: it asks for a command, the agent runs it and sends back what the command
printed, and the model ends with that. `make test-agents`: their packages are too large for every run of the CI."""

import json
import os
import subprocess
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parent / "node_modules" / ".bin"
# Printed in pieces, as the model says what stands between the marks last.
COMMAND = "echo seaworthy > made.txt && printf '<%s>%s</%s>' say 'It is written.' say"


def task(tool: str, arguments: dict) -> str:
    call = json.dumps({"name": tool, "arguments": arguments})
    return f"<say>I will write it.\n<tool_call>\n{call}\n</tool_call></say>"


def run(home: Path, command: list[str], **environment: str) -> str:
    """What the agent prints, in an empty directory; `home` keeps it from its user's settings."""
    work = home / "work"
    work.mkdir()
    environment = os.environ | {"HOME": str(home), "IS_SANDBOX": "1"} | environment
    done = subprocess.run(
        [PROGRAMS / command[0], *command[1:]], cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (work / "made.txt").read_text() == "seaworthy\n", done.stdout + done.stderr
    return done.stdout


def test_claude_code(sim, tmp_path):
    steps = sim.metric("plimsoll_steps_total")
    prompt = task("Bash", {"command": COMMAND, "description": "Write the file"})
    said = run(
        tmp_path,
        ["claude", "-p", prompt, "--model", "claude-sonnet-4-5", "--max-turns", "4", "--allowedTools", "Bash"],
        ANTHROPIC_BASE_URL=sim.url,
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert said.strip() == "It is written."
    assert sim.metric("plimsoll_steps_total") > steps
    # The second turn finds the first in the prefix cache, whatever the agent changes from request to request.
    assert sim.metric("plimsoll_prefix_cache_hits_total") > 10_000
    sim.wait_until_empty()


def test_codex(sim, tmp_path):
    hits = sim.metric("plimsoll_prefix_cache_hits_total")
    settings = {
        "model": "claude-sonnet-4-5",
        "model_provider": "plimsoll",
        "model_providers.plimsoll.name": "Plimsoll",
        "model_providers.plimsoll.base_url": f"{sim.url}/v1",
        "model_providers.plimsoll.wire_api": "responses",
        "web_search": "disabled",
    }
    flags = [flag for name, value in settings.items() for flag in ("-c", f"{name}={json.dumps(value)}")]
    prompt = task("exec_command", {"cmd": COMMAND})
    said = run(tmp_path, ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *flags, prompt])
    assert "It is written." in said
    assert sim.metric("plimsoll_prefix_cache_hits_total") > hits + 10_000
    sim.wait_until_empty()
