"""The store: what was written comes back, whole runs or none. What can be wrong with a file: tests/faults."""

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from artifacts.errors import BadInput, Incompatible
from artifacts.store.content_hash import content_hash
from artifacts.store.store import Store
from tests.helpers.stores import MODEL, activations, run_info, verified, write


@pytest.fixture
def path(tmp_path):
    return tmp_path / "moe.duckdb"


@pytest.fixture
def filled(path):
    write(path)
    return path


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


def test_artefacts_of_another_model_are_refused_by_name(filled):
    with Store.open(filled, read_only=True) as store:
        assert store.require_model(MODEL.fingerprint, name="demo") == MODEL
        with pytest.raises(Incompatible, match="holds demo .a{16}., not mixtral .b{16}."):
            store.require_model("b" * 64, name="mixtral")


def test_the_same_content_in_another_order_and_another_run_has_the_same_hash(path):
    rows = traces(3).set_column(4, "token", pa.array([1, 2, 3]))
    rows = rows.set_column(7, "predicted", pa.array([[1.0], None, [3.0]], pa.list_(pa.float32())))
    others = rows.set_column(4, "token", pa.array([1, 2, 4])), rows.slice(0, 2), rows.drop_columns("predicted")
    with Store.open(path) as store:
        first, same, *differing = (
            content_hash(store, store.write_run(run_info(), {"traces": table}))
            for table in (rows, rows.take([2, 0, 1]), *others)
        )
        command = content_hash(store, store.write_run(run_info("learn"), {"traces": rows}))
    assert first == same and len({first, command, *differing}) == 5
