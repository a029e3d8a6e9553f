"""Compiled loops: compiled when they are needed, kept where a folder is writable, and usable where
none is."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests import ROOT

pytestmark = pytest.mark.slow

PARTS = """
from artifacts.common.numba_loops import part

@part
def half(x):
    return x / 2
"""
LOOPS = """
from artifacts.common.numba_loops import kernel
from mine.parts import half

@kernel("float64(float64)")
def unused(x):
    return half(x)

@kernel("float64(float64[::1], int64)")
def half_of(x, i):
    return half(x[i])

@kernel(["float64(float64, float32[::1])", "float64(float64, float64[::1])"])
def halved(start, x):
    for i in range(len(x)):
        start += half(x[i])
    return start

@kernel("float64(float64[::1])")
def by_another(x):
    return half_of(x, 0)

@kernel(["float64(float32[::1])", "float64(float64[::1])"])
def by_the_fitting(x):
    return halved(0, x)
"""


def installed(tmp_path: Path) -> Path:
    """A folder with a package of kernels, none of which has been compiled yet."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "parts.py").write_text(PARTS)
    (tmp_path / "mine" / "loops.py").write_text(LOOPS)
    return tmp_path


def printed(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    cleared = {
        name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "XDG_"))
    }
    variables = cleared | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)} | environment
    code = f"from numpy import ones; from mine import loops; print({code})"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=variables, capture_output=True, text=True
    )


def halved(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return printed(folder, "loops.halved(0, ones(3))", **environment)


def kept(folder: Path) -> dict[str, int]:
    """The files of compiled code, by name, and when each was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")}


def test_compiled_once_and_kept(tmp_path: Path) -> None:
    folder = installed(tmp_path)
    assert halved(folder).stdout == "1.5\n"
    first = kept(folder)
    assert len(first) == 1 and next(folder.rglob("*.nbc")).parent == folder / "mine" / "__pycache__"
    assert halved(folder).stdout == "1.5\n"
    assert kept(folder) == first


def test_each_signature_and_each_kernel_is_compiled_when_it_is_first_called(tmp_path: Path) -> None:
    folder = installed(tmp_path)
    calls = (
        "loops.halved(0, ones(3)), loops.halved(1, ones(4, 'float32')), loops.halved(0, ones(5)), "
    )
    assert printed(folder, calls + "loops.by_another(ones(1))").stdout == "1.5 3.0 2.5 0.5\n"
    first = kept(folder)
    names = sorted(name.partition("-")[0] for name in first)
    assert names == ["loops.by_another", "loops.half_of", "loops.halved", "loops.halved"]
    for path in folder.rglob("loops.half_of-*"):  # which another kernel calls by its name alone
        path.unlink()
    assert printed(folder, "loops.by_another(ones(1))").stdout == "0.5\n"
    assert {name for name in first if kept(folder)[name] != first[name]} == {
        n for n in first if ".half_of-" in n
    }


def test_a_kernel_calls_the_code_for_the_types_that_it_has(tmp_path: Path) -> None:
    folder = installed(tmp_path)
    assert printed(folder, "loops.by_the_fitting(ones(3, 'float32'))").stdout == "1.5\n"
    first = kept(folder)
    assert sorted(name.partition("-")[0] for name in first) == [
        "loops.by_the_fitting",
        "loops.halved",
    ]
    assert (
        printed(folder, "loops.by_the_fitting(ones(3)), loops.by_the_fitting(ones(4, 'f4'))").stdout
        == "1.5 2.0\n"
    )
    assert len(kept(folder)) == 4 and first.items() <= kept(folder).items()


def test_arguments_of_no_signature_are_refused(tmp_path: Path) -> None:
    done = printed(installed(tmp_path), "loops.halved(0, ones(3, 'int64'))")
    assert "TypeError: halved takes float64(float64, float32[::1]) or float64(" in done.stderr
    assert not kept(tmp_path)


def test_code_is_compiled_anew_when_a_module_that_it_is_made_of_changes(tmp_path: Path) -> None:
    folder = installed(tmp_path)
    halved(folder)
    (folder / "mine" / "parts.py").write_text(PARTS.replace("x / 2", "x / 4"))
    assert halved(folder).stdout == "0.75\n"


def test_where_no_folder_can_be_written_it_runs_and_says_so(tmp_path: Path) -> None:
    """A file stands in the place of each cache folder, since root may write to any folder."""
    folder = installed(tmp_path)
    (folder / "mine" / "__pycache__").touch()
    (tmp_path / "home").touch()
    done = halved(folder, HOME=str(tmp_path / "home"))
    assert done.stdout == "1.5\n", done.stderr
    assert done.stderr.count("compiled code cannot be kept") == 1
    assert not list(tmp_path.rglob("*.nbc"))


def test_a_damaged_file_of_the_cache_is_done_without(tmp_path: Path) -> None:
    """As a power cut leaves it: with its name and without its bytes."""
    folder = installed(tmp_path)
    halved(folder)
    for path in folder.rglob("*.nbi"):
        path.write_bytes(b"")
    done = halved(folder)
    assert done.stdout == "1.5\n" and "compiled code cannot be kept" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("module", "name"),
    [("low_bit", "multiplier"), ("gated_packed", "packed_adder")],
)
def test_what_is_made_for_a_width_is_found_again(module: str, name: str) -> None:
    """numba finds a closure by the values that it holds: if it held another compiled function,
    every process would compile it anew."""
    made = getattr(import_module(f"runtime.kernels.cpu.replicas.{module}"), name)
    made(4, is_narrow=True).compiled()
    again = made.__wrapped__(4, is_narrow=True).compiled()
    assert sum(again.stats.cache_hits.values()) == 1 and not again.stats.cache_misses
