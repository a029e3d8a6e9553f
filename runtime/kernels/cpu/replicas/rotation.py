"""The rotations of `artifacts.quantisation.trellis.rotation` of one vector, compiled by numba.
Importing this module imports numba.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import I64, advanced, load, store
from artifacts.common.numba_loops import kernel, part
from artifacts.quantisation.trellis.rotation import cosines, factors, signs
from runtime.kernels.cpu.lanes import LANES, SUMS, chosen

f32 = np.float32
ROTATION = "float32[::1], float32[:, ::1]"


class RotationParts(NamedTuple):
    """Operands of the rotation of vectors of one length [n]: signs [n] and the transform of the odd
    factor [m, m]."""

    signs: np.ndarray
    odd: np.ndarray


@cache
def rotation(length: int, *, is_back: bool) -> RotationParts:
    """Return the operands of the rotation of vectors of this length."""
    odd = cosines(factors(length)[0])
    return RotationParts(
        np.array(signs(length)), np.ascontiguousarray(odd.T if is_back else odd).copy()
    )


@intrinsic
def transform_vectors(context, address, count):
    """Replace each of `count` vectors of 16 floats by its Hadamard transform, not scaled."""

    def generate(target, builder, signature, arguments):
        address, count = arguments
        with cgutils.for_range(builder, count, intp=I64) as loop:
            place = advanced(builder, address, loop.index, 4 * LANES)
            values = load(builder, place, SUMS)
            for half in (1, 2, 4, 8):
                turned = chosen(builder, values, values, [lane ^ half for lane in range(LANES)])
                signs = ir.Constant(SUMS, [-1.0 if lane & half else 1.0 for lane in range(LANES)])
                values = builder.fadd(turned, builder.fmul(values, signs))
            store(builder, values, place)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@part
def transform(x, odd, out):
    """Write T x to out [n]: the transform `odd` [m, m] over the parts of x [n], then a Hadamard
    transform of each part."""
    m = len(odd)
    power = len(x) // len(odd)
    out[:] = 0
    scale = f32(1 / np.sqrt(power))
    for row in range(m):
        own = out[row * power : (row + 1) * power]
        for column in range(m):
            factor = odd[row, column] * scale
            given = x[column * power : (column + 1) * power]
            for i in range(power):
                own[i] += factor * given[i]
    half = 1
    if power >= LANES:
        transform_vectors(out.ctypes.data, len(out) // LANES)
        half = LANES
    while half < power:
        for first in range(0, len(out), 2 * half):
            low = out[first : first + half]
            high = out[first + half : first + 2 * half]
            for i in range(half):
                total = low[i] + high[i]
                difference = low[i] - high[i]
                low[i] = total
                high[i] = difference
        half *= 2


@kernel(f"void(float32[:, ::1], {ROTATION}, float32[:, ::1])", nogil=True)
def rotate(x, signs, odd, out):
    """Write U x of each row of x [T, n] to out [T, n]."""
    for t in range(len(x)):
        transform(x[t] * signs, odd, out[t])


@kernel(f"void(float32[:, ::1], {ROTATION}, float32[:, ::1])", nogil=True)
def rotate_back(x, signs, odd, out):
    """Write U^T x of each row; `odd` is the transposed transform."""
    for t in range(len(x)):
        transform(x[t], odd, out[t])
        out[t] *= signs
