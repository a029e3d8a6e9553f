"""Helpers of eviction policies: initial last uses, columns whose single cells are cheap, and one
sort key made of two, which sorts in a fraction of the time."""

from array import array

import numpy as np

from artifacts.shape import Shape

# Last uses below this many steps, and whole ranks below half as many, keep their order: months of
# tokens.
_STEPS = 2**34


def never_used(shape: Shape) -> np.ndarray:
    """Return [num_keys] the step -1, the last use of keys that were never used."""
    return np.full(shape.num_keys, -1, np.int64)


def cells_and_view(values: np.ndarray) -> tuple[array, np.ndarray]:
    """Return a copy of `values` [num_keys], int64 or float64, as an array and as a numpy view of
    it. The few keys of a step are written to the array one by one, in a fraction of the time that
    numpy takes to index them."""
    cells = array({"i": "q", "f": "d"}[values.dtype.kind], values.tobytes())
    return cells, np.frombuffer(cells, values.dtype)


def rank_then_last_use(rank: np.ndarray | int, last_use: np.ndarray | int) -> np.ndarray | int:
    """Return sort keys by `rank`, whole numbers, ties by the step of the last use, from -1 on."""
    return rank * _STEPS + last_use
