"""Operands of CPU kernels for one token."""

from typing import NamedTuple

import numpy as np


class TokenOperands(NamedTuple):
    """The last arguments of every kernel: the token [H], the row of `y` [K, H] for each expert, and
    an empty array of the weights' type."""

    x: np.ndarray
    rows: np.ndarray
    y: np.ndarray
    like: np.ndarray
