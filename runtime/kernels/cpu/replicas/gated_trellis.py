"""Gated experts on one token, on replicas in trellis codes of any rate, compiled by numba: the
token is rotated once for all of them, and the codes are read where they lie.

Importing this module imports numba. Shapes: H hidden, I neurons of an expert, n experts, K top-k.
"""

import numpy as np

from artifacts.common.numba_loops import kernel, part
from runtime.kernels.cpu.gated import LIKE, TOKEN, swiglu
from runtime.kernels.cpu.replicas.rotation import transform
from runtime.kernels.cpu.replicas.trellis import add_numbers, as_numbers

MATRICES = "int64[:, :, ::1], int64[:, :, ::1]"  # addresses [n, 2, 4] and sizes [n, 2, 5]
FUNCTIONS = "int64[::1]"
ROTATIONS = (
    "Tuple((float32[::1], float32[::1], float32[:, ::1], float32[:, ::1], float32[:, ::1], int64))"
)
"""Signs [H] and [I]; the odd factor's transform for H, for rotating back to H, and for I; and how
many 16-bit numbers stand for each number of a token."""


@part
def rotated_numbers(x, signs, odd, digits):
    """Return a token in its rotation, as `as_numbers` writes it: int16 [digits, .], and the worth
    of these numbers [1]."""
    turned = np.empty(len(x), np.float32)
    numbers = np.empty((digits, len(x)), np.int16)
    transform(x * signs, odd, turned)
    return numbers, np.full(1, as_numbers(turned, digits, numbers), np.float32)


@part
def add_replica(functions, addresses, sizes, rotations, token, out, like):
    """Add an expert on a token in numbers to `out` [H]. addresses[0] and sizes[0] are those of gate
    and up, addresses[1] and sizes[1] those of down, in the layout of
    `runtime.kernels.cpu.replicas.trellis`."""
    signs, inner_signs, _, odd_back, inner_odd, digits = rotations
    num_neurons = len(inner_signs)
    inner = np.zeros((1, 2 * num_neurons), np.float32)
    acts = np.empty(num_neurons, np.float32)
    add_numbers(functions, addresses[0], sizes[0], token[0], token[1], inner)
    for n in range(num_neurons):
        acts[n] = swiglu(inner[0, n], inner[0, num_neurons + n], like)
    numbers, worth = rotated_numbers(acts, inner_signs, inner_odd, digits)
    turned = np.zeros((1, len(out)), np.float32)
    back = np.empty_like(out)
    add_numbers(functions, addresses[1], sizes[1], numbers, worth, turned)
    transform(turned[0], odd_back, back)
    for h in range(len(out)):
        out[h] += back[h] * signs[h]


@kernel(
    [f"void({FUNCTIONS}, {MATRICES}, {ROTATIONS}, {TOKEN}, {like})" for like in LIKE], nogil=True
)
def add(functions, addresses, sizes, rotations, x, rows, y, like):
    """Add expert i, as `add_replica` does, on x [H] to y[rows[i]], y [K, H]."""
    token = rotated_numbers(x, rotations[0], rotations[2], rotations[5])
    for i in range(len(rows)):
        add_replica(functions, addresses[i], sizes[i], rotations, token, y[rows[i]], like)
