"""Expert maps in the store: as rows of `expert_maps`, and read back as arrays without a copy."""

import numpy as np
import pyarrow as pa

from artifacts.errors import BadInput, Incompatible
from artifacts.routing.expert_maps import DTYPES, ExpertMaps
from artifacts.shape import Shape
from artifacts.store.runs import StoredRun, as_written
from artifacts.store.store import Store

COMMAND = "build-maps"
LEARN = "learn"
TABLE = "expert_maps"


def map_rows(maps: ExpertMaps, origins: np.ndarray) -> pa.Table:
    """Rows of `expert_maps`; `origins` [N, 2] are the request and iteration of each map."""
    lists = {"embedding": maps.embeddings, "probabilities": maps.probabilities}
    request, iteration = origins.astype(np.int32).T
    return pa.table(
        {"map": np.arange(len(maps), dtype=np.int32), "request": request, "iteration": iteration}
        | {name: _lists(values) for name, values in lists.items()}
    )


def map_arrays(rows: pa.Table, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings [N, H] and probabilities [N, L, E], float32 and read-only, of rows in the order of
    their maps.

    Nothing is copied when Arrow holds each column in one piece, as `Store.read` returns them.
    Raises BadInput when they do not fit together.
    """
    embeddings, flat = (_matrix(rows, name) for name in ("embedding", "probabilities"))
    size = (shape.num_layers, shape.num_experts)
    if flat.shape[1] != size[0] * size[1] or rows["map"].to_pylist() != list(range(rows.num_rows)):
        raise BadInput(
            "these expert maps are damaged or of another model: run moectl build-maps again"
        )
    return embeddings, flat.reshape(-1, *size)


def stored_maps(
    store: Store, *, model_id: str | None = None, run_id: int | None = None
) -> ExpertMaps:
    """The maps of a run, by default the newest (of a model if given), with their capacity and
    distance.

    Raises Incompatible when there are none, or the run belongs to another model.
    """
    run = latest_maps(store, model_id) if run_id is None else store.run(run_id)
    if run is None or TABLE not in run.contents:
        raise Incompatible(
            f"{store.path} holds no expert maps{_of(run_id)}: run moectl build-maps first"
        )
    if model_id is not None and run.info.model_id != model_id:
        raise Incompatible(
            f"run {run.run_id} of {store.path} is of another model: run moectl build-maps on this "
            "one"
        )
    return _read(store, run)


def latest_maps(store: Store, model_id: str | None = None) -> StoredRun | None:
    """The newest run with maps, built or learned, of one model if given; None if there is none."""
    return store.latest_run(model_id=model_id, table=TABLE)


def stored_origins(store: Store, run_id: int) -> np.ndarray:
    """[N, 2] the request and iteration of each of a run's maps."""
    rows = store.read(TABLE, run_id)
    return np.stack([rows[name].to_numpy() for name in ("request", "iteration")], axis=1).astype(
        np.int64
    )


def _read(store: Store, run: StoredRun) -> ExpertMaps:
    shape = next(model.shape for model in store.models() if model.model_id == run.info.model_id)
    parameters = run.info.parameters
    with as_written(run, store.path):
        dtype = str(parameters["dtype"])
        distance = int(parameters["distance"])
        capacity = int(parameters["capacity"])
    if dtype not in DTYPES:
        raise BadInput(f"{store.path} has expert maps of {dtype[:40]}: run moectl build-maps again")
    # DuckDB's Arrow tables have no float16; values that were rounded to float16 convert back
    # exactly.
    arrays = [
        array.astype(dtype, copy=False)
        for array in map_arrays(store.read(TABLE, run.run_id), shape)
    ]
    return ExpertMaps.of(*arrays, distance=distance, capacity=capacity)


def _of(run_id: int | None) -> str:
    return "" if run_id is None else f" of run {run_id}"


def _lists(values: np.ndarray) -> pa.Array:
    """[N, ...] as N lists."""
    flat = values.reshape(len(values), -1)
    return pa.FixedSizeListArray.from_arrays(
        pa.array(flat.astype(np.float32, copy=False).ravel()), flat.shape[1]
    )


def _matrix(rows: pa.Table, name: str) -> np.ndarray:
    column = rows[name]
    lists = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    values = lists.flatten()
    if values.null_count:
        raise BadInput(f"expert maps have empty places in {name}: run moectl build-maps again")
    values = values.to_numpy(zero_copy_only=True)
    width, rest = divmod(len(values), max(1, len(lists)))
    if rest or not np.isfinite(values).all() or (np.asarray(lists.value_lengths()) != width).any():
        raise BadInput(
            f"expert maps differ in the length of {name}, or are not finite: run moectl "
            "build-maps again"
        )
    return values.reshape(len(lists), width)
