"""Checks of the rows of a trace against each other: each token once in a layer of a pass, each
expert once in a row."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from artifacts.errors import BadInput
from artifacts.traces.trace import Trace

_MOST = 2**62


def check_rows(trace: Trace) -> tuple[str, ...]:
    """Return notes that a reader needs on a trace that lacks rows. Rows count from 0.

    Raises BadInput for an expert twice in a row, a row without a weight above 0, and a token twice
    in a layer of a pass.
    """
    _check_experts(trace.experts)
    _check_weights(trace.weights)
    # The layer comes last: rows of one token are neighbours then, and only their remainder by
    # `num_layers` differs.
    layer, num_layers = _dense(trace.layer)
    numbers = _row_numbers((trace.pass_, trace.request, trace.token, layer))
    ordered = numbers if (numbers[1:] > numbers[:-1]).all() else np.sort(numbers)
    if (ordered[1:] == ordered[:-1]).any():
        raise BadInput(_same_rows(trace, numbers))
    if _is_complete(ordered, num_layers):
        return ()
    starts = np.flatnonzero(np.diff(ordered // num_layers, prepend=-1))
    short = np.count_nonzero(np.diff(starts, append=len(trace)) < num_layers)
    return (
        f"{short:,} of {len(starts):,} tokens have no row in some layers: they are left out there",
    )


def _is_complete(ordered: np.ndarray, num_layers: int) -> bool:
    """Return whether row numbers that rise and differ hold, token by token, all layers."""
    if len(ordered) % num_layers:
        return False
    first = ordered[::num_layers]
    last = ordered[num_layers - 1 :: num_layers]
    return not (first % num_layers).any() and bool((last - first == num_layers - 1).all())


def _dense(layer: np.ndarray) -> tuple[np.ndarray, int]:
    """The layers numbered without gaps, and how many occur."""
    occurs = np.bincount(layer) > 0
    return (layer if occurs.all() else (np.cumsum(occurs) - 1)[layer]), int(occurs.sum())


def _row_numbers(columns: Sequence[np.ndarray]) -> np.ndarray:
    """[N] int64: ordered as the rows of the non-negative columns are, the first column before the
    second; equal for equal rows, and only for those."""
    numbers = columns[0].astype(np.int64)
    size = int(numbers.max()) + 1
    for column in columns[1:]:
        own_size = int(column.max()) + 1
        if size * own_size > _MOST:
            numbers, column = (
                np.unique(each, return_inverse=True)[1] for each in (numbers, column)
            )
            size = int(numbers.max()) + 1
            own_size = int(column.max()) + 1
        numbers *= own_size
        numbers += column
        size *= own_size
    return numbers


def _check_experts(experts: np.ndarray) -> None:
    ranks = np.ascontiguousarray(experts.T)  # comparing whole ranks takes a tenth of the time
    for rank, other in combinations(range(len(ranks)), 2):
        same = ranks[rank] == ranks[other]
        if same.any():
            row = int(same.argmax())
            raise BadInput(f"row {row} selects expert {experts[row, rank]} twice")


def _check_weights(weights: np.ndarray) -> None:
    if not (weights[:, 0] > 0).all() and not (has_one := (weights > 0).any(axis=1)).all():
        raise BadInput(f"row {has_one.argmin()} gives no expert a weight above 0")


def _same_rows(trace: Trace, numbers: np.ndarray) -> str:
    order = np.argsort(numbers, kind="stable")
    at = int((np.diff(numbers[order]) == 0).argmax())
    row, again = order[at : at + 2]
    what = f"token {trace.token[row]} of request {trace.request[row]} in layer {trace.layer[row]}"
    return f"rows {row} and {again} are both {what} of pass {trace.pass_[row]}"
