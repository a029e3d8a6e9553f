"""Compiled loops: kept where a folder can be written, and still there where none can."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
import time
started = time.perf_counter()
from runtime.policies import parse
from runtime.policies.base import Artefacts
from artifacts.shape import Shape
parse("eviction", "horizon").prepare(Shape(num_layers=2, num_experts=4, top_k=2, expert_nbytes=1), Artefacts())
print("ready", time.perf_counter() - started)
"""


def installed(tmp_path: Path) -> Path:
    """A copy of the packages that the policies need, with nothing compiled."""
    for package in ("artifacts", "runtime"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def prepared(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    cleared = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "XDG_"))}
    variables = cleared | {"PYTHONDONTWRITEBYTECODE": "1"} | environment
    return subprocess.run([sys.executable, "-c", CODE], cwd=folder, env=variables, capture_output=True, text=True)


def test_compiled_once_and_kept(tmp_path: Path) -> None:
    folder = installed(tmp_path)
    assert prepared(folder).stdout.startswith("ready ")
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")}
    assert kept and all("__pycache__" in str(path) for path in kept)
    assert prepared(folder).stdout.startswith("ready ")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")} == kept


def test_where_no_folder_can_be_written_it_runs_and_says_so(tmp_path: Path) -> None:
    """A file stands where each folder would be made: root may write anywhere else."""
    folder = installed(tmp_path)
    (folder / "runtime" / "policies" / "eviction" / "__pycache__").touch()
    (tmp_path / "home").touch()
    done = prepared(folder, HOME=str(tmp_path / "home"))
    assert done.stdout.startswith("ready "), done.stderr
    assert "compiled code cannot be kept" in done.stderr
    assert not list(tmp_path.rglob("*.nbc"))
