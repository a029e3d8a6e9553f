"""The check of a store with replicas: its findings, and their exit codes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from artifacts.quantisation.replica_file import file_hash, replica_nbytes, replica_root
from artifacts.store.store import add_run
from moectl.cli import main
from tests.helpers.replica_files import written
from tests.helpers.stores import MODEL, run_info

Verified = Callable[..., dict]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with a file of replicas for each of two experts."""
    path = tmp_path / "moe.duckdb"
    (folder := replica_root(path) / "aaaa").mkdir(parents=True)
    rows = []
    for expert in range(2):
        file = written(folder / f"{expert}.safetensors", seed=expert)
        columns = {
            "layer": 0,
            "expert": expert,
            "file": f"aaaa/{file.name}",
            "hash": file_hash(file),
        }
        rows += [
            {**columns, "bits": bits, "nbytes": nbytes}
            for bits, nbytes in replica_nbytes(file).items()
        ]
    add_run(path, run_info("quantize"), {"replicas": pa.Table.from_pylist(rows)}, model=MODEL)
    (folder / ".lock").touch()
    return path


@pytest.fixture
def findings_of(store: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """The findings of a check that ends with this exit code."""

    def run(*, code: int) -> list[str]:
        assert main(["inspect", "store", "--verify", "--store", str(store), "--json"]) == code
        report = json.loads(capsys.readouterr().out)
        assert (report["runs"], report["replica_files"]) == (1, 2)
        return [f"{finding['about']}: {finding['says']}" for finding in report["findings"]]

    return run


def test_a_whole_store(findings_of: Callable[..., list[str]]) -> None:
    assert findings_of(code=0) == []


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda file: file.unlink(), "1 of 2 replica files are missing, namely aaaa/0.safetensors"),
        (
            lambda file: file.write_bytes(file.read_bytes()[:-1]),
            "1 of 2 replica files are not what was written",
        ),
        (
            lambda file: shutil.copyfile(file.with_name("1.safetensors"), file),
            "are not what was written",
        ),
        (
            lambda file: written(file, seed=0, bits=(2,)),
            "1 of 2 replica files have another size than was written",
        ),
        (
            lambda file: shutil.rmtree(file.parent.parent),
            "2 of 2 replica files are missing, as aaaa/0.safetensors",
        ),
    ],
)
def test_a_replica_that_is_not_its_own(
    store: Path, findings_of: Callable[..., list[str]], damage: Callable[[Path], object], says: str
) -> None:
    damage(replica_root(store) / "aaaa" / "0.safetensors")
    [finding] = findings_of(code=3)
    assert finding.startswith("run 1: ") and says in finding


def test_what_is_left_over_is_told_apart(
    store: Path, findings_of: Callable[..., list[str]]
) -> None:
    root = replica_root(store)
    (root / "bbbb").mkdir()
    (root / "bbbb" / "5.safetensors").touch()
    (root / "aaaa" / "7.safetensors").touch()
    (root / "aaaa" / ".scratch").mkdir()
    for name in (".moe.duckdb.v2.99999999.tmp", "moe.duckdb.bench-12.jsonl"):
        (store.parent / name).touch()
    (store.parent / "moe.duckdb.profile-12").mkdir()
    assert findings_of(code=6) == [
        ".moe.duckdb.v2.99999999.tmp: half written by process 99999999, which is gone",
        "moe.duckdb.bench-12.jsonl: a bench under way or stopped",
        "moe.duckdb.profile-12: a profile under way or stopped",
        ".scratch: half written",
        "7.safetensors: no run names it",
        "bbbb: 1 replica files that no run names: a quantize that was stopped",
    ]


def test_it_is_all_of_a_store(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "store", "--verify", "--run", "1", "--store", str(store)]) == 2
    assert "looks at all of a store" in capsys.readouterr().err
