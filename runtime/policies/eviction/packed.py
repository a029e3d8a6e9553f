"""Two sort keys in one, which sorts in a fraction of the time of two."""

import numpy as np

_STEPS = 1 << 40  # more than any run takes


def then_older(rank: np.ndarray, last_use: np.ndarray) -> np.ndarray:
    """By `rank`, whole numbers, and among equals by the step of the last use, from -1 on."""
    return rank * _STEPS + last_use
