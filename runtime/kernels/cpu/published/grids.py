"""Matrices of ggml's types with grids, times one token. Importing this module imports numba."""

import numpy as np

from artifacts.common.numba_loops import kernel
from artifacts.formats.gguf.grids import grid
from runtime.kernels.cpu.gated import part
from runtime.kernels.cpu.published.grid_vectors import dot_points, read_row
from runtime.kernels.cpu.published.published import (
    BLOCK_NBYTES,
    CODES,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
    KIND,
    MATRIX,
    in_sixteen_bits,
)

_2XXS, _2XS, _2S = (grid(name).numpy() for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S"))
_3XXS, _3S = (grid(name).numpy() for name in ("IQ3_XXS", "IQ3_S"))


@part
def _grid(kind):
    if kind == IQ2_XXS:
        return _2XXS.ctypes.data
    if kind == IQ2_XS:
        return _2XS.ctypes.data
    if kind == IQ2_S:
        return _2S.ctypes.data
    return _3XXS.ctypes.data if kind == IQ3_XXS else _3S.ctypes.data


@part
def _room(kind, num_blocks):
    """Return room for the numbers of the points of a row, its signs and its scales."""
    points = np.empty(num_blocks * (64 if kind in (IQ3_XXS, IQ3_S) else 32), np.uint16)
    scales = np.empty(num_blocks * (16 if kind in (IQ2_XS, IQ2_S) else 8), np.float32)
    return points, np.empty(num_blocks * 32, np.uint8), scales


@kernel(f"void({MATRIX})", nogil=True)
def multiply_points(fields, start, x, y, is_narrow):
    """Add x [I] times a matrix of IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS or IQ3_S to y [O].

    Numbers of x are rounded to 16 bits of the largest among 256; unless `is_narrow`, what this
    leaves of them is multiplied in the same way."""
    kind = fields[KIND]
    num_blocks = len(x) // 256
    points, signs, scales = _room(kind, num_blocks)
    token = np.empty(len(x), np.int16)
    worth = np.empty(num_blocks, np.float32)
    for _ in range(1 if is_narrow else 2):
        x = in_sixteen_bits(x, token, worth)
        for row in range(len(y)):
            blocks = start + fields[CODES] + row * num_blocks * fields[BLOCK_NBYTES]
            read_row(kind, blocks, fields[BLOCK_NBYTES], num_blocks, worth, points, signs, scales)
            y[row] += dot_points(kind, num_blocks, _grid(kind), token, points, signs, scales)
