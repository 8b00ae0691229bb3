"""`plimsoll pull`, `list` and `rm`, with the stand-in of the Hub and a cache of their own."""

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import subprocess

import conftest
import pytest
from conftest import BINARY, NO_PROFILE_CACHE, PATIENCE, SMOLLM2
from test_download import COMMIT, FILES, REPO, hub

SIZE = sum(len(data) for data in FILES.values())


@pytest.fixture
def environment(tmp_path):
    mine = lambda name: not name.startswith(("PLIMSOLL_", "HF_"))
    environment = {name: value for name, value in os.environ.items() if mine(name)}
    environment |= NO_PROFILE_CACHE | {"PLIMSOLL_DEVICE_LOCK_DIR": str(tmp_path), "HF_XET_TELEMETRY_ENABLED": "0"}
    return environment | {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": "http://127.0.0.1:9"}


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "home/hub"


def run(environment, *args: str, **more) -> subprocess.CompletedProcess:
    return subprocess.run([BINARY, *args], env=environment, capture_output=True, text=True, timeout=PATIENCE, **more)


def store(cache, repo: str, files: dict[str, bytes], commit: str = COMMIT, ref: str = "main"):
    """A model in the cache, as huggingface_hub lays it out."""
    directory = cache / f"models--{repo.replace('/', '--')}"
    for name, data in files.items():
        blob = directory / "blobs" / f"{name.replace('/', '_')}-{len(data)}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        link = directory / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (directory / "refs").mkdir(exist_ok=True)
    (directory / "refs" / ref).write_text(commit)
    return directory


def test_pull_list_and_rm(environment, cache):
    with hub() as (endpoint, enough):
        enough.set()
        environment["HF_ENDPOINT"] = endpoint
        first = run(environment, "pull", REPO)
        assert first.returncode == 0, first.stderr
        what, path = first.stdout.splitlines()
        assert re.fullmatch(rf"{REPO}: {len(FILES)} files, [\d.]+ [KM]iB; downloaded", what), what
        assert path == str(cache / f"models--acme--tiny/snapshots/{COMMIT}")
        again = run(environment, "pull", f"{REPO}@{COMMIT}")
        assert again.returncode == 0 and "nothing to download" in again.stdout, again
        wrong = run(environment, "pull", f"{REPO}@main", "--revision", "v1")
        assert wrong.returncode == 2 and "--revision" in wrong.stderr, wrong
        missing = run(environment, "pull", "acme/none")
        assert missing.returncode == 3 and "was not found" in missing.stderr, missing
    # Without the Hub, too.
    offline = run(environment | {"HF_HUB_OFFLINE": "1"}, "pull", REPO)
    assert offline.returncode == 0 and "nothing to download" in offline.stdout, offline

    listed = json.loads(run(environment, "list", "--json", "--device", "cpu", "--max-num-seqs", "2").stdout)
    [model] = listed["models"]
    assert model | {"model": REPO, "commit": COMMIT, "revisions": ["main"], "bytes": SIZE, "family": "qwen2", "fits": "yes"} == model
    assert model["kv_tokens"] > 0 and model["path"] == path and listed["cache"] == str(cache)
    asked = run(environment, "rm", REPO, stdin=subprocess.DEVNULL)
    assert asked.returncode == 2 and "--yes" in asked.stderr, asked
    removed = run(environment, "rm", "--yes", REPO)
    assert removed.returncode == 0 and removed.stdout.startswith(f"removed {REPO} ("), removed
    assert not list(cache.glob("models--*"))
    gone = run(environment, "rm", "-f", REPO)
    assert gone.returncode == 2 and "is not in the cache" in gone.stderr, gone
    assert "no models in" in run(environment, "list").stdout


def test_list_says_what_fits_and_why_not(environment, cache):
    store(cache, "acme/tiny", FILES)
    other = {"config.json": b'{"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}', "tokenizer.json": b"{}"}
    store(cache, "acme/speech", other | {"model.safetensors": b"x"})
    store(cache, "acme/half", {name: data for name, data in FILES.items() if name != "model.safetensors"})
    directory = store(cache, "acme/gguf", {"M-Q4_0.gguf": b"x", "M-Q8_0.gguf": b"y"})
    shutil.copy(SMOLLM2, directory / "blobs/M-Q4_0.gguf-1")
    (cache / "datasets--acme--data/snapshots").mkdir(parents=True)
    models = json.loads(run(environment, "list", "--json", "--device", "cpu").stdout)["models"]
    models = {model["model"]: model for model in models}
    found = {name: (model["family"], model["fits"]) for name, model in models.items()}
    assert found == {
        "acme/tiny": ("qwen2", "yes"),
        "acme/speech": (None, "unsupported"),
        "acme/half": ("qwen2", "incomplete"),
        "acme/gguf:Q4_0": ("llama", "yes"),
        "acme/gguf:Q8_0": (None, "unsupported"),
    }
    assert "Whisper" in models["acme/speech"]["reason"] and "plimsoll pull" in models["acme/half"]["reason"]
    # What fits is what plan says.
    small = json.loads(run(environment, "list", "acme/gguf:Q4_0", "--json", "--device", "cpu", "--device-memory", "64MiB").stdout)
    assert [(model["model"], model["fits"]) for model in small["models"]] == [("acme/gguf:Q4_0", "no")]
    assert "do not fit" in small["models"][0]["reason"]

    other = run(environment, "list", "acme/other", "--device", "cpu")
    assert other.returncode == 2 and "acme/other" in other.stderr and "is not in the cache" in other.stderr, other
    table = run(environment, "list", "--device", "cpu")
    assert table.returncode == 0, table.stderr
    head, *rows = table.stdout.split("\n\n")[0].splitlines()
    assert len(rows) == 5 and len({row.index("main") for row in rows} | {head.index("REVISION")}) == 1, table.stdout
    assert all(row[: head.index("SIZE") + 4].rstrip().endswith("B") for row in rows), table.stdout
    assert str(cache) in table.stdout and "device: cpu" in table.stdout


def test_rm_of_a_revision_and_of_one_file(environment, cache):
    old = FILES | {"generation_config.json": b"{}"}
    store(cache, "acme/tiny", old, commit="1" * 40, ref="v1")
    directory = store(cache, "acme/tiny", FILES)
    done = run(environment, "rm", "-y", "acme/tiny@v1")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (directory / "snapshots").iterdir()] == [COMMIT]
    assert (directory / "blobs" / f"config.json-{len(FILES['config.json'])}").exists() and not (directory / "blobs/generation_config.json-2").exists()
    assert run(environment, "list", "--device", "cpu", "--json").stdout.count('"fits": "yes"') == 1
    files = store(cache, "acme/gguf", {"M-Q4_0.gguf": b"xx", "M-Q8_0.gguf": b"y"})
    assert "(2 B)" in run(environment, "rm", "-y", "acme/gguf:Q4_0").stdout
    assert [path.name for path in (files / "blobs").iterdir()] == ["M-Q8_0.gguf-1"]
    # All or nothing.
    both = run(environment, "rm", "-y", "acme/tiny", "acme/none")
    assert both.returncode == 2 and directory.exists(), both


def test_rm_asks_on_a_terminal(environment, cache):
    directory = store(cache, "acme/tiny", FILES)
    for answer, stays in [("n\n", True), ("\n", True), ("y\n", False)]:
        ours, theirs = pty.openpty()
        with subprocess.Popen([BINARY, "rm", "acme/tiny"], env=environment, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
            os.write(ours, answer.encode())
            said = child.stdout.read()
        os.close(ours)
        os.close(theirs)
        assert child.returncode == 0 and said.startswith("remove acme/tiny (") and "[y/N]" in said, said
        assert directory.exists() == stays


def test_rm_leaves_what_is_in_use(environment, cache, tmp_path, monkeypatch):
    directory = store(cache, "acme/tiny", FILES)
    blob = next((directory / "blobs").glob("model.safetensors-*"))
    with blob.open("rb"):
        done = run(environment, "rm", "-y", "acme/tiny")
        assert done.returncode == 2 and f"in use by process {os.getpid()}" in done.stderr, done
    locks = cache / ".locks/models--acme--tiny"
    locks.mkdir(parents=True)
    with (locks / "x.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run(environment, "rm", "-y", "acme/tiny")
        assert done.returncode == 2 and "being downloaded" in done.stderr, done
    # A server that has read all of it and holds none of its files.
    for name, value in (environment | {"HF_HUB_OFFLINE": "1"}).items():
        monkeypatch.setenv(name, value)
    with conftest.process(tmp_path, "acme/tiny", "--max-model-len", "64", "--max-num-seqs", "2", "--device", "cpu") as (child, port, log):
        done = run(environment, "rm", "-y", "acme/tiny")
        assert done.returncode == 2 and f"process {child.pid} (plimsoll)" in done.stderr, (done, log.read_text())
    assert directory.exists()
    assert run(environment, "rm", "-y", "acme/tiny").returncode == 0
    assert not directory.exists()


def test_rm_touches_nothing_outside_the_cache(environment, cache, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("theirs")
    directory = store(cache, "acme/tiny", FILES)
    (directory / "snapshots" / COMMIT / "linked").symlink_to(outside)
    (directory / "refs/linked").symlink_to(outside)
    (cache / "models--acme--elsewhere").symlink_to(outside)
    done = run(environment, "rm", "-y", "acme/elsewhere")
    assert done.returncode == 2 and "is a link" in done.stderr, done
    for wrong in ["../outside", "acme/..", "/etc", "acme/tiny@../../x"]:
        done = run(environment, "rm", "-y", wrong)
        assert done.returncode == 2, done
    assert run(environment, "rm", "-y", "acme/tiny").returncode == 0
    assert not directory.exists() and (outside / "file").read_text() == "theirs"


def test_a_pull_that_is_ended_can_be_resumed(environment, cache):
    with hub() as (endpoint, enough):
        environment["HF_ENDPOINT"] = endpoint
        child = subprocess.Popen([BINARY, "pull", REPO], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1)
        child.terminate()
        assert child.wait(PATIENCE) != 0
        child.communicate()
        enough.set()
        done = run(environment, "pull", REPO)
        assert done.returncode == 0 and "downloaded" in done.stdout, done
    assert len(list((cache / "models--acme--tiny/snapshots" / COMMIT).iterdir())) == len(FILES)
