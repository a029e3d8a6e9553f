"""Gated experts on one token, on replicas of 1 to 8 bits, compiled by numba: the packed streams are
read in place.

Importing this module imports numba. Shapes: H hidden, I neurons of an expert, n experts, K top-k.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from numba import carray

from artifacts.common.numba_loops import kernel
from runtime.kernels.cpu.gated import BFLOAT16_LIKE, LIKE, TOKEN, part, pointer, swiglu
from runtime.kernels.cpu.published.columns import is_in_digits
from runtime.kernels.cpu.replicas.low_bit import code_worth, product, product_in_digits
from runtime.kernels.cpu.replicas.streams import can_look_up

WORDS, SCALES, ZEROS = range(3)
_INT32 = np.zeros(1, np.int32)
_INT16 = np.zeros(1, np.int16)


# Parts of the closure below are outside it: numba does not cache a closure that holds another
# compiled function, and would compile it again in every process.


@part
def _arrays(addresses, num_groups, bits, num_inputs, num_outputs):
    """Return the words, scales and zero-points of the matrix whose arrays lie at `addresses`
    [3]."""
    words = carray(pointer(addresses[WORDS], _INT32), ((num_inputs * bits + 31) // 32, num_outputs))
    scales = carray(pointer(addresses[SCALES], _INT16), (num_groups, num_outputs))
    zeros = carray(pointer(addresses[ZEROS], _INT32), (num_groups, (num_outputs * bits + 31) // 32))
    return words, scales, zeros


@part
def _add(addresses, num_groups, bits, worth, is_fast, x, y):
    """Add x [T, I] times the matrix to y [T, O]."""
    words, scales, zeros = _arrays(addresses, num_groups, bits, x.shape[1], y.shape[1])
    product(words, scales, zeros, bits, worth, is_fast, x, y)


@part
def _add_in_digits(addresses, num_groups, bits, worth, x, y):
    words, scales, zeros = _arrays(addresses, num_groups, bits, x.shape[1], y.shape[1])
    product_in_digits(words, scales, zeros, bits, worth, x, y)


@cache
def packed_adder(bits: int, *, is_narrow: bool) -> Callable[..., None]:
    """Return `add(addresses, groups, x, rows, y, like)` of one width, for models in bfloat16 if
    `is_narrow`, else for others, which adds expert i on x to y[rows[i]].

    addresses[i, 0] point to the words, scales and zero-points of gate and up [., 2 I], addresses[i,
    1] to those of down [., H]; at 1 bit the address of zero-points is any address. `groups` holds
    the numbers of input groups of the two matrices, and I. addresses [n, 2, 3], groups [3], rows
    [n], x [H], y [K, H].
    """
    likes = [like for like in LIKE if (like == BFLOAT16_LIKE) == is_narrow]
    worth = code_worth(bits)
    is_fast = can_look_up(bits, is_narrow=is_narrow)
    has_digits = is_in_digits(bits, is_narrow=is_narrow)

    @kernel([f"void(int64[:, :, ::1], int64[::1], {TOKEN}, {like})" for like in likes], nogil=True)
    def add(addresses, groups, x, rows, y, like):
        num_neurons = groups[2]
        token = x.reshape(1, len(x))
        inner = np.empty((1, 2 * num_neurons), np.float32)
        acts = np.empty((1, num_neurons), np.float32)
        for i in range(len(rows)):
            inner[:] = 0
            out = y[rows[i] : rows[i] + 1]
            if has_digits:
                _add_in_digits(addresses[i, 0], groups[0], bits, worth, token, inner)
            else:
                _add(addresses[i, 0], groups[0], bits, worth, is_fast, token, inner)
            for n in range(num_neurons):
                acts[0, n] = swiglu(inner[0, n], inner[0, num_neurons + n], like)
            if has_digits:
                _add_in_digits(addresses[i, 1], groups[1], bits, worth, acts, out)
            else:
                _add(addresses[i, 1], groups[1], bits, worth, is_fast, acts, out)

    return add
