"""Gated experts on one token, on replicas in trellis codes of any rate, compiled by numba: the token is rotated once
for all of them, and the codes are read where they lie.

Importing this module imports numba. Shapes: H hidden, I neurons of an expert, n experts, K top-k.
"""

import numpy as np

from artifacts.common.numba_loops import kernel
from runtime.kernels.cpu.gated import LIKE, TOKEN, swiglu
from runtime.kernels.cpu.rotation import transform
from runtime.kernels.cpu.trellis import product

_ROTATIONS = "float32[::1], float32[::1], float32[:, ::1], float32[:, ::1], float32[:, ::1]"


@kernel(
    [f"void(int64[::1], int64[:, :, ::1], int64[:, :, ::1], {_ROTATIONS}, int64, {TOKEN}, {like})" for like in LIKE],
    nogil=True,
)
def add(functions, addresses, sizes, signs, inner_signs, odd, odd_back, inner_odd, digits, x, rows, y, like):
    """Add expert i on x [H] to y[rows[i]], y [K, H].

    addresses[i, 0] and sizes[i, 0] are those of gate and up, addresses[i, 1] and sizes[i, 1] of down, as
    `runtime.kernels.cpu.trellis` has them. `signs` [H], `odd` and `odd_back` are the rotation of the token and back,
    `inner_signs` [I] and `inner_odd` that of what down takes.
    """
    num_neurons, token = len(inner_signs), np.empty((1, len(x)), np.float32)
    transform(x * signs, odd, token[0])
    inner, acts = np.empty((1, 2 * num_neurons), np.float32), np.empty((1, num_neurons), np.float32)
    turned, out, back = np.empty((1, num_neurons), np.float32), np.empty((1, len(x)), np.float32), np.empty_like(x)
    for i in range(len(rows)):
        inner[:], out[:] = 0, 0
        product(functions, addresses[i, 0], sizes[i, 0], token, digits, inner)
        for n in range(num_neurons):
            acts[0, n] = swiglu(inner[0, n], inner[0, num_neurons + n], like) * inner_signs[n]
        transform(acts[0], inner_odd, turned[0])
        product(functions, addresses[i, 1], sizes[i, 1], turned, digits, out)
        transform(out[0], odd_back, back)
        for h in range(len(x)):
            y[rows[i], h] += back[h] * signs[h]
