"""Runs the tests of the kernels for GPUs with the oldest Triton that they support, on any machine.

    python -m tools.gpu.oldest_triton
    python -m tools.gpu.oldest_triton --folder ~/triton-3.6 tests/runtime/kernels/test_compiled_gpu.py

It installs that Triton, and a numpy that its interpreter works with, into a folder of their own,
and puts that folder first on the path of pytest: the environment stays as it is. A folder that has
them is used again.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from runtime.kernels.load import OLDEST_TRITON
from tools import ROOT
from tools.arguments import parser_of

TESTS = tuple(
    f"tests/runtime/kernels/test_{name}_gpu.py"
    for name in ("compiled", "compiled_dense", "published", "trellis", "decide")
)
WANTED = (f"triton=={OLDEST_TRITON}.*", "numpy<2.4")


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        if not (folder / "triton").is_dir():
            install(folder)
        sys.exit(run(folder, options.tests))


def install(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--target", str(folder), *WANTED], check=True)


def run(folder: Path, tests: list[str]) -> int:
    """Run the tests with the packages of `folder`, and return pytest's exit code. Raises
    RuntimeError where another Triton would be tested."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    ask = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    found = subprocess.run(
        ask, env=environment, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    if not found.startswith(f"{OLDEST_TRITON}."):
        raise RuntimeError(
            f"{folder} has triton {found}, not {OLDEST_TRITON}: give --folder another one"
        )
    print(f"triton {found}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, folder=(Path, "of the packages, kept; else one that is removed"))
    parser.add_argument("tests", nargs="*", default=list(TESTS), help="files of tests, or tests")
    return parser.parse_args()


if __name__ == "__main__":
    main()
