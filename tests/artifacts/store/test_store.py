"""The store: what was written comes back, whole runs or none. tests/faults has what can be wrong
with a file."""

from contextlib import closing

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from artifacts.errors import BadInput, Incompatible
from artifacts.store.database import connection_to
from artifacts.store.store import Store
from tests.helpers.stores import MODEL, activations, run_info, traces, verified, write


@pytest.fixture
def path(tmp_path):
    return tmp_path / "moe.duckdb"


@pytest.fixture
def filled(path):
    write(path)
    return path


def test_what_was_written_comes_back(path):
    entropy = pa.FixedSizeListArray.from_arrays(
        pa.array(np.linspace(0, 1, 202, dtype=np.float32)), 101
    )
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
        assert (first.info.parameters, first.info.seed, first.info.tokens) == (
            {"alpha": [0.5]},
            3,
            7,
        )
        assert second.info.model_id is None
        assert store.read("activations", 1).equals(tables["activations"])
        assert np.array_equal(
            store.read("entropy", 1)["percentiles"].combine_chunks().flatten().to_numpy(),
            entropy.flatten().to_numpy(),
        )
        assert store.models() == [MODEL]
        assert {name: size.num_rows for name, size in store.sizes().items()} == {
            "activations": 5000,
            "entropy": 2,
        }
        assert store.latest_run("profile") == first
        assert store.latest_run("profile", "another") is None
        with pytest.raises(BadInput, match="no run 9; it has 1, 2"):
            store.run(9)
        with pytest.raises(BadInput, match="run 2 .* wrote no activations"):
            store.read("activations", 2)


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
            store.write_run(
                run_info(), {"activations": activations(10), "entropy": pa.table({"nonsense": [1]})}
            )
        assert store.write_run(run_info(), {"activations": activations(10)}) == 2
    assert verified(filled) == [1, 2]
    assert [entry.name for entry in filled.parent.iterdir()] == [filled.name]


def test_artefacts_of_another_model_are_refused_by_name(filled):
    with Store.open(filled, read_only=True) as store:
        assert store.require_model(MODEL.fingerprint, name="demo") == MODEL
        with pytest.raises(Incompatible, match="holds demo .a{16}., not mixtral .b{16}."):
            store.require_model("b" * 64, name="mixtral")
        with pytest.raises(
            Incompatible,
            match="not demo .b{16}., whose files have changed since; name another store",
        ):
            store.require_model("b" * 64, name="demo")


def test_a_long_query_says_nothing_on_stdout(path):
    """DuckDB draws a progress bar there where Python is interactive, as in a worker of the
    tests."""
    with closing(connection_to(path, read_only=False)) as connection:
        setting = "SELECT value FROM duckdb_settings() WHERE name = 'enable_progress_bar'"
        assert connection.execute(setting).fetchall() == [("false",)]
