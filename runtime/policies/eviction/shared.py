"""Last uses, and two sort keys in one, which sorts in a fraction of the time of two."""

import numpy as np

from artifacts.shape import Shape

# Steps beyond which order is lost, and half as many ranks, uses say: months of tokens either way.
_STEPS = 2**34


def never_used(shape: Shape) -> np.ndarray:
    """[num_keys] the step of the last use, before there was any."""
    return np.full(shape.num_keys, -1, np.int64)


def rank_then_last_use(rank: np.ndarray, last_use: np.ndarray) -> np.ndarray:
    """By `rank`, whole numbers, and among equals by the step of the last use, from -1 on."""
    return rank * _STEPS + last_use
