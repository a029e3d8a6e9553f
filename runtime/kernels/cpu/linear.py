"""A matrix times one token or a few, by address: its numbers plain, or in ggml's blocks of 32.
Importing this module imports numba."""

import numpy as np
from numba import carray

from artifacts.common.numba_loops import part
from runtime.kernels.cpu.gated import are_bfloat16, as_float, pointer, products
from runtime.kernels.cpu.published.blocks import add_blocks_of_32, nbytes_of
from runtime.kernels.cpu.published.published import IN_BYTES

f32 = np.float32
PLAIN = -1
# PLAIN or a KIND of `published`, addresses of matrix and bias (0: none)
LINEAR = "UniTuple(int64, 3)"
_ROWS = 128  # that stay in the cache until all tokens are multiplied


@part
def add_blocks(kind, address, x, y, like):
    """Add a matrix [O, I] of this kind, which is not plain, times x [T, I] to y [T, O]."""
    nbytes = x.shape[1] // 32 * nbytes_of(kind - IN_BYTES if kind >= IN_BYTES else kind)
    at_once = _ROWS if len(x) > 1 else y.shape[1]
    for first in range(0, y.shape[1], at_once):
        rows = address + first * nbytes
        for t in range(len(x)):
            own = y[t, first : first + at_once]
            add_blocks_of_32(kind, rows, x[t], own, are_bfloat16(like))


@part
def linear(operand, x, count, like):
    """Return [T, O], float32: a matrix [O, I] times x [T, I], which was rounded, plus the bias
    [O]."""
    kind, address, bias = operand
    if kind == PLAIN:
        return products(address, bias, x, count, like)
    out = np.zeros((len(x), count), np.float32)
    add_blocks(kind, address, x, out, like)
    biases = carray(pointer(bias, like), count if bias else 0)
    for t in range(len(out)):
        for o in range(len(biases)):
            out[t, o] += as_float(biases[o])
    return out
