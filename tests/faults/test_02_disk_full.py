"""A write that fails for lack of room, whichever it is.

Of the files of replicas: tests/profilers/quantise/test_replicas.py.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from artifacts.common.files import FULL, replacing
from artifacts.errors import BadInput, OutOfResources
from artifacts.store.check import check_store
from artifacts.store.store import Store
from profilers.compare.bench import BenchSetting
from profilers.compare.samples import KeptSamples
from tests.helpers.stores import said_by, verified, write

LIMITED = """
import resource, signal
from artifacts.errors import Problem
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for name, nbytes in zip(sys.argv[1::2], map(int, sys.argv[2::2])):
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
    try:
        while True:
            write(Path(name), 50_000)
    except Problem as error:
        print(type(error).__name__, error)
"""


def limited(*cases: tuple[Path, int]) -> list[str]:
    """Output of a process with a limited length of files, by case."""
    return said_by(LIMITED, *(part for case in cases for part in case)).splitlines()


def test_no_store_is_left_where_none_can_be_made(tmp_path: Path) -> None:
    cases = [(tmp_path / f"{nbytes}.duckdb", nbytes) for nbytes in (0, 4096, 100_000, 400_000)]
    for (path, _), said in zip(cases, limited(*cases), strict=True):
        assert said.startswith(f"OutOfResources no space left on the disk of {path};")
    assert list(tmp_path.iterdir()) == []


def test_earlier_runs_stay(filled: Path) -> None:
    limits = (1_900_000, 2_500_000, 4_000_000)
    paths = [shutil.copyfile(filled, filled.with_name(f"{limit}.duckdb")) for limit in limits]
    for path, said in zip(paths, limited(*zip(paths, limits, strict=True)), strict=True):
        assert said.startswith(f"OutOfResources no space left on the disk of {path};")
        before = verified(path)
        assert before[0] == 1 and write(path) == len(before) + 1
        with Store.open(path, read_only=True) as store:
            assert check_store(store).findings == ()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file is always full here")
def test_the_exit_code_tells_also_where_stderr_cannot(path: Path) -> None:
    """As with `2> log` on the full disk."""
    said = """
from artifacts.errors import OutOfResources
from moectl.shared.terminal.exit_codes import exit_code_of
def full():
    raise OutOfResources("full")
sys.stderr = open("/dev/full", "w")
sys.exit(0 if exit_code_of(full) == 4 else 1)
"""
    assert said_by(said) == ""


@contextmanager
def written(path: Path, code: int) -> Iterator[None]:
    """A context in which the write to `path` fails."""
    with (
        pytest.raises(OutOfResources, match=f"no space left to write {path}"),
        replacing(path) as temporary,
    ):
        temporary.write_text("half")
        yield
        raise OSError(code, "as the system says it")


@pytest.mark.parametrize("code", FULL)
def test_a_file_is_what_it_was(tmp_path: Path, code: int) -> None:
    path = tmp_path / "trace.parquet"
    path.write_text("whole")
    with written(path, code):
        assert len(list(tmp_path.iterdir())) == 2
    assert path.read_text() == "whole" and list(tmp_path.iterdir()) == [path]


def test_the_samples_of_a_bench_before_the_one_that_was_cut_off_stay(tmp_path: Path) -> None:
    kept = KeptSamples(tmp_path / "moe.duckdb", "digest")
    setting = BenchSetting("lru", "25%")
    line = (
        f'{{"round": 0, "setting": {{"preset": "{setting.preset}", "budget": "25%"}}, "sample": '
        '{}, "pace": {}}'
    )
    kept.path.write_text(f"{line[:40]}")
    assert kept.load() == ({}, {}) and kept.path.read_text() == ""
    kept.path.write_text("{\n")
    with pytest.raises(BadInput, match="is damaged .* remove it"):
        kept.load()
