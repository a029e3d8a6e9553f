"""A matrix times one token, by address: its numbers plain, or in ggml's blocks of 32. Importing
this module imports numba."""

import numpy as np
from numba import carray

from artifacts.common.numba_loops import part
from runtime.kernels.cpu.gated import are_bfloat16, as_float, pointer, products
from runtime.kernels.cpu.published.blocks import add_blocks_of_32

f32 = np.float32
PLAIN = -1
# PLAIN or a KIND of `published`, addresses of matrix and bias (0: none)
LINEAR = "UniTuple(int64, 3)"


@part
def add_blocks(kind, address, x, y, like):
    """Add a matrix [O, I] of this kind, which is not plain, times x [I] to y [O]."""
    add_blocks_of_32(kind, address, x, y, are_bfloat16(like))


@part
def linear(operand, x, count, like):
    """Return [O], float32: a matrix [O, I] times x [I], which was rounded, plus the bias [O]."""
    kind, address, bias = operand
    if kind == PLAIN:
        return products(address, bias, x, count, like)
    out = np.zeros(count, np.float32)
    add_blocks(kind, address, x, out, like)
    biases = carray(pointer(bias, like), count if bias else 0)
    for o in range(len(biases)):
        out[o] += as_float(biases[o])
    return out
