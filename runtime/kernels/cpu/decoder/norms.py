"""RMS norms of one token, compiled by numba. Importing this module imports numba.

Sums are in float32. Where values are of 16 bits, they are rounded where the module rounds them.
Numbers are read and written in place, by address, and `like` is an array of their type, uint16 for
bfloat16, int16 for float16.
"""

import numpy as np
from numba import carray

from artifacts.common.numba_loops import kernel
from runtime.kernels.cpu.gated import LIKE, as_float, as_stored, part, pointer, rounded

f32 = np.float32
FLOATS = np.empty(0, np.float32)
INTEGERS = np.empty(0, np.int64)


@part
def read(address, count, like):
    """Return the `count` numbers at this address as float32."""
    stored = carray(pointer(address, like), count)
    values = np.empty(count, np.float32)
    for i in range(count):
        values[i] = as_float(stored[i])
    return values


@part
def round_all(values, like):
    """Round float32 values in place to the numbers of `like`, and return them."""
    for i in range(len(values)):
        values[i] = rounded(values[i], like)
    return values


@part
def write(values, address, like):
    """Write float32 values to this address, rounded to the numbers there."""
    stored = carray(pointer(address, like), len(values))
    for i in range(len(values)):
        stored[i] = as_stored(rounded(values[i], like), like)


@part
def scale_to_unit(values, weights, eps, is_rounded, like):
    """Divide values [H] by their root mean square and multiply them by weights [H], in place. If
    `is_rounded`, they are also rounded before the multiplication."""
    total = f32(0)
    for i in range(len(values)):
        total += values[i] * values[i]
    scale = f32(1) / np.sqrt(total / f32(len(values)) + eps)
    for i in range(len(values)):
        value = values[i] * scale
        values[i] = rounded((rounded(value, like) if is_rounded else value) * weights[i], like)


@kernel(
    [f"void(int64, int64, float32, boolean, int64, int64, {like})" for like in LIKE], nogil=True
)
def normalise(weights, count, eps, is_rounded, x, out, like):
    """Write the norm of x [H] to `out`; its weights are float32."""
    values = read(x, count, like)
    scale_to_unit(values, carray(pointer(weights, FLOATS), count), eps, is_rounded, like)
    write(values, out, like)
