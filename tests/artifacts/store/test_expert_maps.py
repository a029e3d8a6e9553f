"""Expert maps in a store come back as one array each, without a copy."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from artifacts.errors import BadInput, Incompatible
from artifacts.routing.expert_maps import ExpertMaps
from artifacts.shape import Shape
from artifacts.store.expert_maps import COMMAND, TABLE, map_arrays, map_rows, stored_maps
from artifacts.store.runs import ModelInfo, RunInfo, utc_now
from artifacts.store.store import Store

SHAPE = Shape(num_layers=3, num_experts=4, top_k=2, expert_nbytes=100)
MODEL = ModelInfo("demo", "a" * 64, "olmoe", SHAPE)


def filled(num_maps: int = 5, dtype: str = "float32") -> ExpertMaps:
    random = np.random.default_rng(0)
    maps = ExpertMaps(7, num_layers=3, num_experts=4, hidden=6, distance=2, dtype=dtype)
    maps.add(random.standard_normal((num_maps, 6)), random.dirichlet(np.ones(4), (num_maps, 3)))
    return maps


def write(path: Path, rows: pa.Table, dtype: str = "float32") -> None:
    parameters = {"capacity": 7, "distance": 2, "dtype": dtype}
    with Store.open(path) as store:
        store.add_model(MODEL)
        store.write_run(
            RunInfo(COMMAND, MODEL.model_id, utc_now(), 1.0, parameters=parameters), {TABLE: rows}
        )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_maps_come_back_to_the_bit(dtype: str, tmp_path: Path) -> None:
    maps = filled(dtype=dtype)
    path = tmp_path / "moe.duckdb"
    write(path, map_rows(maps, np.arange(10).reshape(5, 2)), dtype)
    with Store.open(path, read_only=True) as store:
        maps_read = stored_maps(store, model_id=MODEL.model_id)
        rows = store.read(TABLE, 1)
    assert (maps_read.dtype, maps_read.capacity, maps_read.distance, len(maps_read)) == (
        dtype,
        7,
        2,
        5,
    )
    assert np.array_equal(maps_read.embeddings, maps.embeddings)
    assert np.array_equal(maps_read.probabilities, maps.probabilities)
    assert rows["request"].to_pylist() == [0, 2, 4, 6, 8] and rows["iteration"].to_pylist() == [
        1,
        3,
        5,
        7,
        9,
    ]
    assert maps_read.add(maps.embeddings[:3], maps.probabilities[:3]).tolist() == [5, 6, 2]


def test_nothing_is_copied(tmp_path: Path) -> None:
    write(tmp_path / "moe.duckdb", map_rows(filled(), np.zeros((5, 2))))
    with Store.open(tmp_path / "moe.duckdb", read_only=True) as store:
        rows = store.read(TABLE, 1)
    for name, array in zip(("embedding", "probabilities"), map_arrays(rows, SHAPE), strict=True):
        buffer = rows[name].chunk(0).values.buffers()[1]
        assert buffer.address <= array.ctypes.data < buffer.address + buffer.size
        assert not array.flags.writeable


def test_what_does_not_fit_together_is_refused() -> None:
    rows = map_rows(filled(), np.zeros((5, 2)))
    with pytest.raises(BadInput, match="damaged or of another model"):
        map_arrays(rows, Shape(2, 4, 2, 100))
    with pytest.raises(BadInput, match="damaged or of another model"):
        map_arrays(rows.take([1, 0, 2, 3, 4]), SHAPE)
    at = rows.column_names.index("embedding")
    ragged = rows.set_column(
        at, "embedding", pa.array([[1.0], [1.0, 2.0], [], [1.0], [1.0]], pa.list_(pa.float32()))
    )
    with pytest.raises(BadInput, match="differ in the length of embedding"):
        map_arrays(ragged, SHAPE)


def test_maps_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "moe.duckdb"
    write(path, map_rows(filled(), np.zeros((5, 2))))
    with Store.open(path) as store:
        store.write_run(RunInfo("profile", MODEL.model_id, utc_now(), 1.0), {})
        assert len(stored_maps(store)) == len(stored_maps(store, run_id=1)) == 5
        with pytest.raises(Incompatible, match="no expert maps: run moectl build-maps"):
            stored_maps(store, model_id="another")
        with pytest.raises(Incompatible, match="no expert maps of run 2"):
            stored_maps(store, run_id=2)
        with pytest.raises(Incompatible, match="of another model"):
            stored_maps(store, run_id=1, model_id="another")
