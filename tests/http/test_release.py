"""What `scripts/release` makes, around the binary that these tests have anyway; installed where nothing else is."""

import hashlib
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import conftest
import pytest
import yaml
from conftest import ROOT

SCRIPT = ROOT / "scripts/release"
# It waits for other builds.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([SCRIPT, "cpu", "--profile", "dev", "--host-glibc", "--out", out], check=True)
    return out


@pytest.fixture(scope="module")
def wheel(dist) -> Path:
    (file,) = dist.glob("plimsoll-*.whl")
    return file


def test_the_wheel_serves_in_an_empty_environment(wheel, tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip = [tmp_path / "venv/bin/python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-index", wheel], check=True)
    monkeypatch.setattr(conftest, "BINARY", tmp_path / "venv/bin/plimsoll")
    with conftest.serve(tmp_path, "sim") as server:
        answer = server.openai.completions.create(model="sim", prompt="<say>a load line</say>", max_tokens=32)
    assert "a load line" in answer.choices[0].text


def test_the_tarball_holds_the_same_binary(dist, wheel):
    (file,) = dist.glob("plimsoll-*.tar.gz")
    (sbom,) = dist.glob("plimsoll-*.cdx.json")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/scripts/plimsoll"))
        binary = archive.read(name)
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        about = archive.read(metadata).decode()
        assert "\nLicense-Expression: Apache-2.0\n" in about and "\nRequires-Dist:" not in about
        assert any(name.endswith(".dist-info/licenses/licenses/THIRD-PARTY") for name in archive.namelist())
        (within,) = (name for name in archive.namelist() if "/sboms/" in name)
        assert archive.read(within) == sbom.read_bytes()
        assert archive.getinfo(name).external_attr >> 16 & 0o111, "it can be executed"
    with tarfile.open(file) as archive:
        files = {Path(entry.name).relative_to(file.name.removesuffix(".tar.gz")).as_posix(): entry for entry in archive}
        assert set(files) == {"bin/plimsoll", "LICENSE", "THIRD-PARTY", "README.md", "plimsoll.cdx.json"}
        assert files["bin/plimsoll"].mode == 0o755 and {entry.uid for entry in files.values()} == {0}
        assert archive.extractfile(files["bin/plimsoll"]).read() == binary
        assert archive.extractfile(files["plimsoll.cdx.json"]).read() == sbom.read_bytes()
        licences = archive.extractfile(files["THIRD-PARTY"]).read().decode()
    # Each crate of the bill of materials with its licence, and the texts; ours are under ours.
    for crate in json.loads(sbom.read_text())["components"]:
        assert crate["name"].startswith("plimsoll-") or f"{crate['name']} {crate['version']}: " in licences, crate["name"]
    assert licences.count("Permission is hereby granted, free of charge") > 50


def test_checksums_are_of_everything(dist):
    sums = dict(reversed(line.split("  ")) for line in (dist / "SHA256SUMS").read_text().splitlines())
    assert sums == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in dist.iterdir() if file.name != "SHA256SUMS"}
    assert len(sums) == 3


def test_an_unknown_device_is_told():
    done = subprocess.run([SCRIPT, "tpu"], capture_output=True, text=True)
    assert done.returncode == 2 and "no device tpu; there are cpu, cuda" in done.stderr


def test_the_workflow_runs_what_is_here():
    """GitHub's own check is not here; that it parses, and names programs and files that exist."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    steps = workflow["jobs"]["release"]["steps"]
    commands = " ".join(step.get("run", "") for step in steps).split()
    ours = [word for word in commands if word.startswith(("scripts/", "tests/"))]
    assert "scripts/release" in ours and [word for word in ours if not (ROOT / word).exists()] == []
    # A tag is compared with the line that has the version.
    assert subprocess.run(["grep", "--line-regexp", 'version = ".*"', ROOT / "Cargo.toml"]).returncode == 0
