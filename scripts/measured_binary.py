"""The binary with CUDA kernels that a script measures."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def add_arguments(parser):
    parser.add_argument("--plimsoll", type=Path, default=os.environ.get("SERVER_BINARY"), metavar="FILE",
                        help="binary to measure [default: SERVER_BINARY, or `make cuda`]")
    parser.add_argument("--plimsoll-args", type=shlex.split, default=[], metavar="ARGS", help="more engine arguments for it, in one word")


def path(args):
    """Where it is; it is built where no argument says."""
    if args.plimsoll is None:
        subprocess.run(["make", "cuda"], check=True, cwd=ROOT, stdout=sys.stderr)
        return ROOT / "target/release/plimsoll"
    return Path(args.plimsoll).resolve()
