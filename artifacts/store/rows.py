"""Rows of the store's tables to arrays, and arrays to rows. L layers, E experts per layer, R
ranks."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.errors import BadInput
from artifacts.quantisation.widths import MADE_WIDTHS, WIDTHS, columns_of, listed
from artifacts.routing.similarity import Similarity


def activation_matrices(
    rows: pa.Table, num_layers: int, num_experts: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Counts [L, E] int64 and weights [L, E] float64 by phase."""
    shape = (num_layers, num_experts)
    matrices = {}
    for phase in rows["phase"].unique().to_pylist():
        of_phase = rows.filter(pc.equal(rows["phase"], phase))
        counts = np.zeros(shape, np.int64)
        weights = np.zeros(shape)
        at = _at(of_phase, ("layer", "expert"), shape)
        counts[at] = _column(of_phase, "count")
        weights[at] = _column(of_phase, "weight")
        matrices[phase] = counts, weights
    return matrices


def coactivation_matrices(
    rows: pa.Table, num_layers: int, num_experts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pair counts [L, E, E] int64 and weights [L, E, E] float64."""
    pairs = np.zeros((num_layers, num_experts, num_experts), np.int64)
    weighted = np.zeros(pairs.shape)
    at = _at(rows, ("layer", "i", "j"), pairs.shape)
    pairs[at] = _column(rows, "count")
    weighted[at] = _column(rows, "weight")
    return pairs, weighted


def similarity_rows(similarity: Similarity) -> pa.Table:
    """Rows of `similarity`, one per ordered pair; values of i alone are repeated for each j."""
    layer, i, j = np.nonzero(
        np.broadcast_to(~np.eye(similarity.loss.shape[1], dtype=bool), similarity.loss.shape)
    )
    return pa.table(
        {
            **_indices(("layer", "i", "j"), (layer, i, j)),
            "cosine": similarity.cosine[layer, i, j],
            "loss": similarity.loss[layer, i, j],
            "left_out": similarity.left_out[layer, i],
            "samples": similarity.samples[layer, i],
        }
    )


def similarity_matrices(rows: pa.Table, num_layers: int, num_experts: int) -> Similarity:
    """The similarity of every layer; diagonals are 1 and 0."""
    cosine = np.tile(np.eye(num_experts), (num_layers, 1, 1))
    loss = np.zeros(cosine.shape)
    left_out = np.zeros(cosine.shape[:2])
    samples = np.zeros(cosine.shape[:2], np.int64)
    layer, i, j = _at(rows, ("layer", "i", "j"), cosine.shape)
    cosine[layer, i, j] = _column(rows, "cosine")
    loss[layer, i, j] = _column(rows, "loss")
    left_out[layer, i] = _column(rows, "left_out")
    samples[layer, i] = _column(rows, "samples")
    return Similarity(cosine, loss, left_out, samples)


def quant_loss_matrices(rows: pa.Table, num_layers: int, num_experts: int) -> dict[str, np.ndarray]:
    """`mse`, `relative`, `gated` and `energy`, each [L, E, W] at each of `WIDTHS`; NaN where there
    is no row."""
    layer, expert = _at(rows, ("layer", "expert"), (num_layers, num_experts))
    bits = _column(rows, "bits")
    if not set(bits.tolist()) <= set(MADE_WIDTHS):
        raise _damaged(f"replicas of {listed(sorted({*bits.tolist()} - {*MADE_WIDTHS}))} bits")
    names = ("mse", "relative", "gated", "energy")
    tables = {name: np.full((num_layers, num_experts, len(WIDTHS)), np.nan) for name in names}
    for name, values in tables.items():
        values[layer, expert, columns_of(bits)] = _column(rows, name)
    return tables


def entropy_percentiles(rows: pa.Table) -> np.ndarray:
    """[L, 101] float32, layers in order."""
    flat = rows["percentiles"].combine_chunks().flatten()
    values = flat.to_numpy(zero_copy_only=False).reshape(rows.num_rows, -1)
    if not np.isfinite(values).all():
        raise _damaged("percentiles that are not finite")
    return values[np.argsort(_column(rows, "layer"))]


def buddy_rows(layers: Sequence[list[list[int]]], q: np.ndarray) -> pa.Table:
    """Rows of `buddies` from the buddy lists of each layer and the q [L, E, E] they were made
    from."""
    entries = [
        (layer, pivot, rank, buddy)
        for layer, lists in enumerate(layers)
        for pivot, buddies in enumerate(lists)
        for rank, buddy in enumerate(buddies)
    ]
    columns = np.array(entries, dtype=np.int64).reshape(-1, 4).T
    layer, pivot, _, buddy = columns
    cumulative = [
        np.cumsum(q[layer, pivot, buddies])
        for layer, lists in enumerate(layers)
        for pivot, buddies in enumerate(lists)
    ]
    return pa.table(
        {
            **_indices(("layer", "pivot", "rank", "buddy"), columns),
            "q": q[layer, pivot, buddy],
            "cumulative": np.concatenate([[], *cumulative]),
        }
    )


def buddy_matrices(
    rows: pa.Table, num_layers: int, num_experts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Buddies [L, E, R] int64 padded with -1, and their q [L, E, R] float64 padded with 0."""
    names = ("layer", "pivot", "rank", "buddy")
    layer, pivot, rank, buddy = _at(rows, names, (num_layers, *[num_experts] * 3))
    shape = (num_layers, num_experts, int(rank.max(initial=0)) + 1)
    buddies = np.full(shape, -1, dtype=np.int64)
    q = np.zeros(shape)
    buddies[layer, pivot, rank] = buddy
    q[layer, pivot, rank] = _column(rows, "q")
    return buddies, q


def curve_rows(hit: np.ndarray, prediction: np.ndarray, prediction_hit: np.ndarray) -> pa.Table:
    """Rows of `curves` from hit [L, E + 1], prediction [L, E] and prediction_hit [L, E, E + 1];
    indices that a kind does not have are NULL."""
    parts = []
    for kind, names, values in (
        ("hit", ("layer", "size"), hit),
        ("prediction", ("layer", "y"), prediction),
        ("prediction_hit", ("layer", "y", "size"), prediction_hit),
    ):
        at = _indices(names, [index.ravel() for index in np.indices(values.shape)])
        nothing = pa.nulls(values.size, pa.uint16())
        columns = {
            name: pa.array(at[name]) if name in at else nothing for name in ("layer", "y", "size")
        }
        parts.append(pa.table({"kind": [kind] * values.size, **columns, "value": values.ravel()}))
    return pa.concat_tables(parts)


def curve_matrices(
    rows: pa.Table, num_layers: int, num_experts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays that `curve_rows` wrote."""
    curves = []
    for kind, *shape in (
        ("hit", num_layers, num_experts + 1),
        ("prediction", num_layers, num_experts),
        ("prediction_hit", num_layers, num_experts, num_experts + 1),
    ):
        of_kind = rows.filter(pc.equal(rows["kind"], kind))
        names = [
            name for name in ("layer", "y", "size") if of_kind[name].null_count < of_kind.num_rows
        ]
        if len(names) != len(shape):
            raise _damaged(f"curves of {kind} without a place")
        curves.append(np.zeros(shape))
        curves[-1][_at(of_kind, names, shape)] = _column(of_kind, "value")
    return tuple(curves)


def split_rows(
    budgets: np.ndarray, exposed: np.ndarray, theta: np.ndarray, cache_size: np.ndarray
) -> pa.Table:
    """Rows of `splits`, one per layer."""
    whole = _indices(("layer", "cache_size"), (np.arange(len(budgets)), cache_size))
    return pa.table({**whole, "budget": budgets, "theta": theta, "exposed_s": exposed})


def split_columns(rows: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The arrays that `split_rows` wrote, layers in order."""
    order = np.argsort(_column(rows, "layer"))
    return tuple(
        _column(rows, name)[order] for name in ("budget", "exposed_s", "theta", "cache_size")
    )


def _indices(names: Sequence[str], columns: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    return {name: column.astype(np.uint16) for name, column in zip(names, columns, strict=True)}


def _column(rows: pa.Table, name: str) -> np.ndarray:
    """A column as numpy; whole numbers as int64, since uint16 would overflow in arithmetic."""
    if rows[name].null_count:
        raise _damaged(f"a {name} that is empty")
    values = rows[name].to_numpy()
    if values.dtype.kind != "f":
        return values.astype(np.int64)
    if not np.isfinite(values).all():
        raise _damaged(f"a {name} that is not finite")
    return values


def _at(rows: pa.Table, names: Sequence[str], sizes: Sequence[int]) -> tuple[np.ndarray, ...]:
    """The columns that index a row's place in an array of these sizes. Raises BadInput for an index
    out of range."""
    found = tuple(_column(rows, name) for name in names)
    for name, values, size in zip(names, found, sizes, strict=True):
        if len(values) and not (values.min() >= 0 and values.max() < size):
            raise _damaged(f"{name} {values.max()}, and the model has {size}")
    return found


def _damaged(what: str) -> BadInput:
    return BadInput(f"rows of the store are damaged or of another model ({what}): make them again")
