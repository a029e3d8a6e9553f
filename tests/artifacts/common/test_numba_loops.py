"""Compiled loops: cached where a folder is writable, and usable where none is."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests import ROOT

LOOPS = """
from artifacts.common.numba_loops import kernel, part

@part
def half(x):
    return x / 2

@kernel("int64(int64)")
def same(x):
    return x

@kernel("float64(float64[::1])")
def halved(x):
    total = 0.0
    for i in range(len(x)):
        total += half(x[i])
    return total
"""


def installed(tmp_path: Path) -> Path:
    """A folder with a kernel that has not been compiled yet."""
    (tmp_path / "loops.py").write_text(LOOPS)
    return tmp_path


def halved(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    cleared = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "XDG_"))}
    variables = cleared | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)} | environment
    code = "import numpy, loops; print(loops.halved(numpy.ones(3)))"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=variables, capture_output=True, text=True)


def test_compiled_once_and_kept(tmp_path: Path) -> None:
    folder = installed(tmp_path)
    assert halved(folder).stdout == "1.5\n"
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")}
    assert kept and all("__pycache__" in str(path) for path in kept)
    assert halved(folder).stdout == "1.5\n"
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")} == kept


def test_where_no_folder_can_be_written_it_runs_and_says_so(tmp_path: Path) -> None:
    """A file stands in the place of each cache folder, since root may write to any folder."""
    folder = installed(tmp_path)
    (folder / "__pycache__").touch()
    (tmp_path / "home").touch()
    done = halved(folder, HOME=str(tmp_path / "home"))
    assert done.stdout == "1.5\n", done.stderr
    assert done.stderr.count("compiled code cannot be kept") == 1
    assert not list(tmp_path.rglob("*.nbc"))


def test_a_damaged_file_of_the_cache_is_done_without(tmp_path: Path) -> None:
    """As a power cut leaves it: with its name and without its bytes."""
    folder = installed(tmp_path)
    halved(folder)
    for kept in folder.rglob("*.nbi"):
        kept.write_bytes(b"")
    done = halved(folder)
    assert done.stdout == "1.5\n" and "compiled code cannot be kept" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("module", "name"),
    [("low_bit", "multiplier"), ("gated_packed", "packed_adder")],
)
def test_what_is_made_for_a_width_is_found_again(module: str, name: str) -> None:
    """numba finds a closure by the values that it holds: if it held another compiled function, every process would
    compile it anew."""
    made = getattr(import_module(f"runtime.kernels.cpu.{module}"), name)
    made(4, is_narrow=False)
    again = made.__wrapped__(4, is_narrow=False)
    assert sum(again.stats.cache_hits.values()) == 1 and not again.stats.cache_misses
