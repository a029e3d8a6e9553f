"""Arrays in one block of memory, because a compiled function spends time on each array that it is
called with."""

import numpy as np


def in_one_block(
    *arrays: np.ndarray, dtype: type = np.float64
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return a block [n] of `dtype` that holds a copy of each array, one after another, and views
    of them in it."""
    block = np.concatenate([array.ravel() for array in arrays]).astype(dtype)
    views = []
    start = 0
    for array in arrays:
        views.append(block[start : start + array.size].reshape(array.shape))
        start += array.size
    return block, views
