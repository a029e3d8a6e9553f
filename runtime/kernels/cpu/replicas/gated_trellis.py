"""Gated experts on one token or a few, on replicas in trellis codes of any rate, compiled by numba:
a token is rotated once for all of them, and the codes are read where they lie.

Importing this module imports numba. Shapes: H hidden, I neurons of an expert, n experts, K top-k.
"""

import numpy as np

from artifacts.common.numba_loops import kernel, part
from runtime.kernels.cpu.gated import LIKE, TOKEN, swiglu
from runtime.kernels.cpu.replicas.rotation import transform
from runtime.kernels.cpu.replicas.trellis import MOST_VECTORS, add_numbers, as_numbers

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
def all_rotated(x, signs, odd, digits):
    """Return tokens x [T, I] in their rotation: int16 [T, digits, I], and worths [T]."""
    numbers = np.empty((len(x), digits, x.shape[1]), np.int16)
    worths = np.empty(len(x), np.float32)
    for t in range(len(x)):
        own, worth = rotated_numbers(x[t], signs, odd, digits)
        numbers[t] = own
        worths[t] = worth[0]
    return numbers, worths


@part
def _add_few(functions, addresses, sizes, numbers, worths, y):
    """Add a matrix times tokens as `all_rotated` gives them to y [T, O]."""
    num_tokens, digits, size = numbers.shape
    first = 0
    while first < num_tokens:
        count = min(MOST_VECTORS // digits, num_tokens - first)
        count -= count == 3
        own = numbers[first : first + count].reshape((count * digits, size))
        worth = worths[first : first + count]
        add_numbers(functions, addresses, sizes, own, worth, y[first : first + count])
        first += count


@part
def add_replica(functions, addresses, sizes, rotations, tokens, out, like):
    """Add an expert on tokens as `all_rotated` gives them to `out` [T, H]. addresses[0] and
    sizes[0] are those of gate and up, addresses[1] and sizes[1] those of down, in the layout of
    `runtime.kernels.cpu.replicas.trellis`."""
    signs, inner_signs, _, odd_back, inner_odd, digits = rotations
    num_neurons = len(inner_signs)
    inner = np.zeros((len(out), 2 * num_neurons), np.float32)
    acts = np.empty((len(out), num_neurons), np.float32)
    _add_few(functions, addresses[0], sizes[0], tokens[0], tokens[1], inner)
    for t in range(len(out)):
        for n in range(num_neurons):
            acts[t, n] = swiglu(inner[t, n], inner[t, num_neurons + n], like)
    numbers, worths = all_rotated(acts, inner_signs, inner_odd, digits)
    turned = np.zeros(out.shape, np.float32)
    back = np.empty(out.shape[1], np.float32)
    _add_few(functions, addresses[1], sizes[1], numbers, worths, turned)
    for t in range(len(out)):
        transform(turned[t], odd_back, back)
        for h in range(len(back)):
            out[t, h] += back[h] * signs[h]


@kernel(
    [f"void({FUNCTIONS}, {MATRICES}, {ROTATIONS}, {TOKEN}, {like})" for like in LIKE], nogil=True
)
def add(functions, addresses, sizes, rotations, x, rows, y, like):
    """Add expert i, as `add_replica` does, on x [H] to y[rows[i]], y [K, H]."""
    token = all_rotated(x.reshape((1, len(x))), rotations[0], rotations[2], rotations[5])
    for i in range(len(rows)):
        out = y[rows[i] : rows[i] + 1]
        add_replica(functions, addresses[i], sizes[i], rotations, token, out, like)
