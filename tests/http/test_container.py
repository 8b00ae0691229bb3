"""What can be said about the image without a container engine; `make test-container` builds and tries it."""

import json
import os
import re
import runpy
import subprocess
import sys

import pytest
from conftest import ROOT
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

SCRIPT = ROOT / "scripts/container"
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def sbom(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("sbom") / "plimsoll.cdx.json"
    subprocess.run([ROOT / "scripts/sbom", file], env=os.environ | {"SOURCE_DATE_EPOCH": "1"}, check=True)
    return file.read_text()


def crates(edges: str) -> set[tuple[str, str]]:
    """Name and version of each crate that cargo finds along these edges from the binary."""
    command = ["cargo", "tree", "--locked", "--package", "plimsoll-cli", "--edges", edges, "--prefix", "none", "--format", "{p}"]
    tree = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {(line.split()[0], line.split()[1].removeprefix("v")) for line in tree.splitlines() if line}


def test_the_bill_of_materials_is_valid_and_whole(sbom):
    document = json.loads(sbom)
    components = document["components"]
    # The validator is slow, and what one tool writes is of one form.
    part = document | {"components": components[::8]}
    assert JsonStrictValidator(SchemaVersion.V1_5).validate_str(json.dumps(part)) is None
    # That it finds anything at all:
    assert JsonStrictValidator(SchemaVersion.V1_5).validate_str(json.dumps(document | {"components": [{"name": "a"}]}))
    assert document["metadata"]["component"]["name"] == "plimsoll"
    assert document["metadata"]["timestamp"] == "1970-01-01T00:00:01Z"
    libraries = [component for component in components if component["purl"].startswith("pkg:npm/")]
    vendored = json.loads((ROOT / "crates/server/src/pages/vendor/packages.json").read_text())
    assert [(one["name"], one["version"]) for one in libraries] == [(one["name"], one["version"]) for one in vendored]
    listed = {(component["name"], component["version"]) for component in components}
    linked = crates("normal")
    assert linked - listed == {(name, version) for name, version in linked if name == "plimsoll-cli"}
    # What only tests need is not in the binary.
    assert not {name for name, _ in listed} & {"proptest", "criterion"}
    for component in components:
        ours = component["name"].startswith("plimsoll-")
        assert component["licenses"] and (ours or component["hashes"]), component
        kind = "npm" if component in libraries else "cargo"
        name = component["name"].replace("@", "%40")
        assert component["purl"].startswith(f"pkg:{kind}/{name}@{component['version']}"), component


def test_script_and_dockerfile_agree():
    script = runpy.run_path(str(SCRIPT), run_name="script")
    assert script["SBOM"].replace("/usr/local/", "/out/") in DOCKERFILE
    assert f"\nUSER {script['USER']}\n" in DOCKERFILE and f"--uid {script['USER']} " in DOCKERFILE
    assert re.search(r"^HEALTHCHECK .*CMD", DOCKERFILE, re.MULTILINE)
    for label in ["title", "description", "licenses", "version", "revision"]:
        assert f"org.opencontainers.image.{label}=" in DOCKERFILE


def test_without_an_engine_the_script_says_so(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "cpu"], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1 and "there is no container engine: docker is not installed; podman is not installed" in done.stderr


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_an_engine_that_does_not_work_is_told(tmp_path, name):
    (tmp_path / name).write_text("#!/bin/sh\necho 'it is not running' >&2\nexit 1\n")
    (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/nonexistent"}
    done = subprocess.run([sys.executable, SCRIPT, "cpu"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and f"{name} does not work here: it is not running" in done.stderr


def test_an_engine_is_asked_for_by_name(tmp_path):
    command = [sys.executable, SCRIPT, "cpu", "--engine", "podman"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1 and "there is no container engine: podman is not installed" in done.stderr


def test_a_binary_that_is_not_there_is_told(tmp_path):
    for flags, message in [
        (["--binary", tmp_path / "none"], f"there is no file {tmp_path}/none"),
        (["--library", SCRIPT], "--library goes with --binary"),
    ]:
        done = subprocess.run([sys.executable, SCRIPT, "cpu", *flags], capture_output=True, text=True)
        assert done.returncode == 2 and message in done.stderr


def test_a_binary_built_outside_takes_the_place_of_the_build_stage(tmp_path):
    """The script lays out what the Dockerfile copies from the stage."""
    script = runpy.run_path(str(SCRIPT), run_name="script")
    (tmp_path / "binary").write_text("a program")
    (tmp_path / "libcublasLt.so.13").write_text("a library")
    script["collect"]("cpu", tmp_path / "binary", [tmp_path / "libcublasLt.so.13"], tmp_path / "context")
    out = tmp_path / "context/out"
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert files == {"bin/plimsoll", "lib/libcublasLt.so.13", script["SBOM"].removeprefix("/usr/local/")}
    assert re.search(r"^FROM \S+ AS build$", DOCKERFILE, re.MULTILINE) and "\nCOPY --from=build /out/ /usr/local/\n" in DOCKERFILE
