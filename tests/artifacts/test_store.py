"""The store: whole runs or none, and one clear line for everything that can be wrong with a file."""

import itertools
import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from artifacts.errors import BadInput, Incompatible, OutOfResources, Problem  # noqa: F401 - Problem is for the child processes
from artifacts.measured import from_rows, to_rows
from artifacts.provenance import ModelInfo, RunInfo, utc_now
from artifacts.schema import _ADDED, _ADDED_COLUMNS
from artifacts.shape import Shape
from artifacts.store import Store
from tests.measured import made

MODEL = ModelInfo("demo", "a" * 64, "olmoe", Shape(num_layers=2, num_experts=4, top_k=2, expert_nbytes=100))


def run_info(command="profile", model_id=MODEL.model_id):
    return RunInfo(
        command, model_id, utc_now(), 1.5, data="builtin", tokens=7, seed=3, parameters={"alpha": [0.5]}, versions={}
    )


def activations(num_rows, seed=0):
    random = np.random.default_rng(seed)
    return pa.table(
        {
            "phase": ["prefill"] * num_rows,
            "layer": (np.arange(num_rows) // 256).astype(np.uint16),
            "expert": (np.arange(num_rows) % 256).astype(np.uint16),
            "count": random.integers(0, 2**50, num_rows),
            "weight": random.random(num_rows),
        }
    )


def verified(path):
    """The ids of all complete runs, each with every row it wrote."""
    with Store.open(path, read_only=True) as store:
        for run in store.runs():
            for table in run.contents:
                store.read(table, run.run_id)
        return [run.run_id for run in store.runs()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "moe.duckdb"


@pytest.fixture
def filled(path):
    with Store.open(path) as store:
        store.add_model(MODEL)
        store.write_run(run_info(), {"activations": activations(20_000)})
    return path


def spawn(code, *arguments):
    """A child process that can import this file and the packages it tests."""
    here = Path(__file__).resolve().parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])])}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_what_was_written_comes_back(path):
    entropy = pa.FixedSizeListArray.from_arrays(pa.array(np.linspace(0, 1, 202, dtype=np.float32)), 101)
    tables = {
        "activations": activations(5000),
        "entropy": pa.table({"layer": [0, 1], "percentiles": entropy, "histogram": [[1], [2]]}),
    }
    with Store.open(path) as store:
        assert store.add_model(MODEL) == store.add_model(MODEL) == MODEL.model_id
        assert store.write_run(run_info(), tables) == 1
        assert store.write_run(run_info("bench", None), {}) == 2
    with Store.open(path, read_only=True) as store:
        first, second = store.runs()
        assert (first.info.parameters, first.info.seed, first.info.tokens) == ({"alpha": [0.5]}, 3, 7)
        assert second.info.model_id is None
        assert store.read("activations", 1).equals(tables["activations"])
        assert np.array_equal(
            store.read("entropy", 1)["percentiles"].combine_chunks().flatten().to_numpy(), entropy.flatten().to_numpy()
        )
        assert store.models() == [MODEL]
        assert {name: size.num_rows for name, size in store.sizes().items()} == {"activations": 5000, "entropy": 2}
        assert store.latest_run("profile") == first
        assert store.latest_run("profile", "another") is None
        with pytest.raises(BadInput, match="no run 9; it has 1, 2"):
            store.run(9)
        with pytest.raises(BadInput, match="run 2 .* wrote no activations"):
            store.read("activations", 2)


def traces(num_rows):
    return pa.table(
        {
            "request": [0] * num_rows,
            "pass": [0] * num_rows,
            "phase": pa.array(["decode"] * num_rows).dictionary_encode(),
            "layer": [1] * num_rows,
            "token": [5] * num_rows,
            "experts": pa.array([[3, 1]] * num_rows, pa.list_(pa.uint16(), 2)),
            "weights": pa.array([[0.5, 0.25]] * num_rows, pa.list_(pa.float32(), 2)),
            "predicted": pa.array([[0.5, 0.5, 0.0]] * num_rows, pa.list_(pa.float32(), 3)),
        }
    )


def test_traces_of_lists_fit(path):
    with Store.open(path) as store:
        run_id = store.write_run(run_info(), {"traces": traces(1)})
        assert store.read("traces", run_id)["experts"].to_pylist() == [[3, 1]]
        assert store.read("traces", run_id)["predicted"].to_pylist() == [[0.5, 0.5, 0.0]]


def test_a_store_without_a_run_goes_away_again(path):
    with Store.open(path):
        assert path.exists()
    assert list(path.parent.iterdir()) == []


def test_a_failed_write_leaves_nothing_and_the_store_usable(filled):
    with Store.open(filled) as store:
        with pytest.raises(duckdb.Error):
            store.write_run(run_info(), {"activations": activations(10), "entropy": pa.table({"nonsense": [1]})})
        assert store.write_run(run_info(), {"activations": activations(10)}) == 2
    assert verified(filled) == [1, 2]
    assert [entry.name for entry in filled.parent.iterdir()] == [filled.name]


WRITE_FOREVER = """
import sys
from test_store import *
with Store.open(sys.argv[1]) as store:
    while True:
        print(store.write_run(run_info(), {"activations": activations(20_000)}), flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.013, 0.031])
def test_a_kill_at_any_time_leaves_only_whole_runs(path, delay_s):
    writer = spawn(WRITE_FOREVER, path)
    acknowledged = [int(writer.stdout.readline()) for _ in range(3)]
    time.sleep(delay_s)
    writer.send_signal(signal.SIGKILL)
    acknowledged += map(int, writer.stdout.read().split())
    writer.wait()
    assert verified(path)[: len(acknowledged)] == acknowledged


HOLD = """
import sys, time, duckdb
connection = duckdb.connect(sys.argv[1], read_only=sys.argv[2] == "reader")
print("open", flush=True)
time.sleep(float(sys.argv[3]))
"""


@pytest.mark.parametrize(("holder", "read_only"), [("writer", False), ("writer", True), ("reader", False)])
def test_a_store_in_use_is_refused_at_once_with_the_holder(filled, holder, read_only):
    process = spawn(HOLD, filled, holder, 30)
    try:
        assert process.stdout.readline() == "open\n"
        start = time.monotonic()
        with pytest.raises(OutOfResources, match=f"in use by process {process.pid};"):
            Store.open(filled, read_only=read_only)
        assert time.monotonic() - start < 2
    finally:
        process.kill()
        process.wait()


def test_a_reader_waits_a_moment_for_a_writer(filled):
    process = spawn(HOLD, filled, "writer", 0.3)
    assert process.stdout.readline() == "open\n"
    assert verified(filled) == [1]
    process.wait()


def test_two_readers_do_not_mind_each_other(filled):
    process = spawn(HOLD, filled, "reader", 30)
    assert process.stdout.readline() == "open\n"
    assert verified(filled) == [1]
    process.kill()
    process.wait()


def sqlite_file(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()


def foreign_database(path):
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE t (x INTEGER)")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.touch(), "is not a store"),
        (lambda path: path.write_text("key,value\n1,2\n" * 100), "is not a store"),
        (sqlite_file, "is not a store"),
        (foreign_database, "not a store of moectl"),
        (lambda path: path.mkdir(), "is a folder"),
    ],
)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_foreign_file_is_refused_and_left_alone(path, make, message, read_only):
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(BadInput, match=message) as caught:
        Store.open(path, read_only=read_only)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert (path.read_bytes() if path.is_file() else None) == before
    assert len(list(path.parent.iterdir())) == 1


def test_a_missing_store_or_folder_is_said_so(path):
    with pytest.raises(BadInput, match="there is no store"):
        Store.open(path, read_only=True)
    with pytest.raises(BadInput, match="there is no folder"):
        Store.open(path.parent / "none" / "moe.duckdb")
    assert list(path.parent.iterdir()) == []


def test_damage_is_noticed_or_harmless(filled):
    whole = filled.read_bytes()
    middle_of_blocks = range(100, len(whole), 64 * 1024)
    damaged = [whole[:size] for size in range(4096, len(whole), 128 * 1024)]
    damaged += [whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :] for at in middle_of_blocks]
    outcomes = set()
    for content in damaged:
        filled.write_bytes(content)
        try:
            with Store.open(filled, read_only=True) as store:
                outcomes.add(store.read("activations", 1).equals(activations(20_000)))
        except BadInput as error:
            assert str(filled) in str(error) and "\n" not in str(error)
            outcomes.add("refused")
    assert "refused" in outcomes
    assert False not in outcomes


def test_lost_rows_are_noticed(filled):
    with duckdb.connect(str(filled)) as connection:
        connection.execute("DELETE FROM activations WHERE expert = 7")
    with Store.open(filled, read_only=True) as store, pytest.raises(BadInput, match="20000 rows .* are left"):
        store.read("activations", 1)


def test_a_newer_schema_is_refused(filled):
    with duckdb.connect(str(filled)) as connection:
        connection.execute("INSERT INTO schema_version VALUES (99, TIMESTAMP '2030-01-01', '9.0')")
    with pytest.raises(Incompatible, match="newer moectl .schema 99, this one knows 3.; upgrade"):
        Store.open(filled)


@pytest.fixture
def first_version(filled):
    """As the first release left it: without the tables that came later."""
    with duckdb.connect(str(filled)) as connection:
        for table in itertools.chain(*_ADDED.values()):
            connection.execute(f"DROP TABLE {table}")
        for column in ("predicted", "embedding"):
            connection.execute(f"ALTER TABLE traces DROP COLUMN {column}")
        connection.execute("UPDATE schema_version SET version = 1")
    return filled


def test_an_older_store_is_brought_up_to_date_after_a_copy(first_version):
    before = verified(first_version)
    first_version.chmod(0o644)
    with Store.open(first_version) as store:
        row = {name: np.zeros(1, np.uint16) for name in ("layer", "expert")} | {"bits": np.full(1, 2, np.uint16)}
        replica = pa.table(row | {"file": ["f"], "nbytes": [7], "hash": ["0"]})
        run_id = store.write_run(run_info("quantize"), {"replicas": replica})
        assert store.read("replicas", run_id).equals(replica)
        assert store.read("traces", store.write_run(run_info(), {"traces": traces(1)})).num_rows == 1
    assert verified(first_version) == [*before, run_id, run_id + 1]
    copy = first_version.with_name(first_version.name + ".v1")
    with duckdb.connect(str(copy), read_only=True) as connection:
        assert connection.execute("SELECT max(version) FROM schema_version").fetchall() == [(1,)]
        assert connection.execute("SELECT count(*) FROM runs").fetchall() == [(len(before),)]


def test_a_profile_of_the_second_version_is_read_and_brought_up_to_date(tmp_path):
    profile = made()
    older = replace(profile, loads=tuple(replace(load, host=None, latency=None) for load in profile.loads))
    path = tmp_path / "moe.duckdb"
    with Store.open(path) as store:
        store.add_model(MODEL)
        run_id = store.write_run(run_info(), {"hardware": to_rows(older)})
    with duckdb.connect(str(path)) as connection:
        for table in _ADDED[3]:
            connection.execute(f"DROP TABLE {table}")
        for table, column in _ADDED_COLUMNS[3]:
            connection.execute(f"ALTER TABLE {table} DROP COLUMN {column.split()[0]}")
        connection.execute("UPDATE schema_version SET version = 2")
    with Store.open(path, read_only=True) as store:
        assert from_rows(store.read("hardware", run_id), profile.conditions) == older
    with Store.open(path) as store:
        again = store.write_run(run_info(), {"hardware": to_rows(profile)})
        assert from_rows(store.read("hardware", again), profile.conditions) == profile
        assert from_rows(store.read("hardware", run_id), profile.conditions) == older


def test_reading_leaves_an_older_store_as_it_is(first_version):
    before = first_version.read_bytes()
    assert verified(first_version)
    assert first_version.read_bytes() == before
    assert sorted(path.name for path in first_version.parent.iterdir()) == [first_version.name]


def test_a_migration_that_fails_changes_nothing(first_version, monkeypatch):
    monkeypatch.setattr("artifacts.store.migration", lambda version: ["CREATE TABLE a (i INTEGER)", "CREATE nonsense"])
    with pytest.raises(duckdb.ProgrammingError):
        Store.open(first_version)
    with duckdb.connect(str(first_version)) as connection:
        assert connection.execute("SELECT max(version) FROM schema_version").fetchall() == [(1,)]
        assert ("a",) not in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()


def test_artefacts_of_another_model_are_refused_by_name(filled):
    with Store.open(filled, read_only=True) as store:
        assert store.require_model(MODEL.fingerprint, name="demo") == MODEL
        with pytest.raises(Incompatible, match="holds demo .a{16}., not mixtral .b{16}."):
            store.require_model("b" * 64, name="mixtral")


FILE_LIMIT = """
import resource, signal, sys
from test_store import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
try:
    with Store.open(sys.argv[1]) as store:
        for _ in range(99):
            store.write_run(run_info(), {"activations": activations(50_000)})
except Problem as error:
    print(type(error).__name__, error)
"""


def test_a_full_disk_keeps_the_earlier_runs(filled):
    said, _ = spawn(FILE_LIMIT, filled).communicate()
    assert said.startswith("OutOfResources no space left")
    assert 1 in verified(filled)
