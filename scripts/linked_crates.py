"""The crates of which the plimsoll binary consists."""

import json
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "crates/cli"


def linked_crates(features: str) -> tuple[dict, list[dict], dict[str, list[str]]]:
    """The binary's own package; those of the crates that are linked into it or run as macros, by name and version; and by the
    id of each what it uses, all as `cargo metadata` has them."""
    command = ["cargo", "metadata", "--locked", "--format-version=1", "--features", features,
               "--filter-platform", f"{platform.machine()}-unknown-linux-gnu"]
    metadata = json.loads(subprocess.run(command, cwd=PROGRAM, stdout=subprocess.PIPE, check=True).stdout)
    # What only tests and build scripts need has the kinds "dev" and "build".
    used = {node["id"]: [edge["pkg"] for edge in node["deps"] if any(kind["kind"] is None for kind in edge["dep_kinds"])]
            for node in metadata["resolve"]["nodes"]}
    root = metadata["resolve"]["root"]
    needed, found = {root}, set()
    while needed:
        found |= needed
        needed = {crate for user in needed for crate in used[user]} - found
    packages = {package["id"]: package for package in metadata["packages"] if package["id"] in found}
    own = packages.pop(root)
    others = sorted(packages.values(), key=lambda package: (package["name"], package["version"]))
    return own, others, {crate: used[crate] for crate in found}
