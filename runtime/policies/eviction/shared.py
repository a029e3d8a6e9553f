"""What eviction policies share: initial last uses, and one sort key made of two, which sorts in a fraction of the
time."""

import numpy as np

from artifacts.shape import Shape

# Last uses below this many steps, and whole ranks below half as many, keep their order: months of tokens.
_STEPS = 2**34


def never_used(shape: Shape) -> np.ndarray:
    """Return [num_keys] the step of the last use before there was any."""
    return np.full(shape.num_keys, -1, np.int64)


def rank_then_last_use(rank: np.ndarray, last_use: np.ndarray) -> np.ndarray:
    """Return sort keys by `rank`, whole numbers, ties by the step of the last use, from -1 on."""
    return rank * _STEPS + last_use
