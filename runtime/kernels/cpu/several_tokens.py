"""Whole gated experts in bfloat16 on a few tokens, compiled by numba: each weight is read from memory once for all.

Rows are multiplied by fours, by up to four tokens at a time: each vector of weights and of x serves four products. More
tokens find the rows in the cache. Rounding is that of `runtime.kernels.cpu.gated`. Importing this module imports numba.

Shapes: T tokens, H hidden, I neurons; H and I are multiples of `STEP`.
"""

from collections.abc import Callable

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import I64, advanced, filled, load, store
from artifacts.common.numba_loops import kernel, part
from runtime.kernels.cpu.gated import as_stored, rounded, swiglu
from runtime.kernels.cpu.lanes import NUMBERS, SUMS, add_pairs, added_up, prefetch
from runtime.kernels.cpu.pairs import STEP

_ROWS, _BLOCK = 4, 4  # rows and tokens that are multiplied at once: their sums stay in registers
_NBYTES = 2 * STEP  # of a vector


def _products(num_tokens: int) -> Callable[..., None]:
    """Return `multiply(rows, steps, x, following, sums)`: four rows, which follow each other, times so many tokens.

    Rows and tokens are of `steps` vectors; those of the tokens take turns. It writes sums [num_tokens, 4] float32, and
    asks for the rows at `following` meanwhile. Operands are int64 addresses.
    """

    @intrinsic
    def multiply(context, rows, steps, x, following, sums):
        def generate(target, builder, signature, arguments):
            rows, steps, x, following, sums = arguments
            stride = builder.mul(steps, I64(_NBYTES))
            starts = [advanced(builder, rows, I64(row), stride) for row in range(_ROWS)]
            totals = [cgutils.alloca_once_value(builder, filled(SUMS, 0.0)) for _ in range(_ROWS * num_tokens)]
            with cgutils.for_range(builder, steps, intp=I64) as loop:
                place = advanced(builder, x, loop.index, _NBYTES * num_tokens)
                coming = advanced(builder, following, loop.index, _NBYTES * _ROWS)
                own = [load(builder, place, NUMBERS, _NBYTES * token) for token in range(num_tokens)]
                for row, start in enumerate(starts):
                    prefetch(builder, coming, _NBYTES * row, cache=2)
                    numbers = load(builder, advanced(builder, start, loop.index, _NBYTES), NUMBERS)
                    for token, total in zip(own, totals[row::_ROWS], strict=True):
                        builder.store(add_pairs(builder, builder.load(total), numbers, token), total)
            for number, total in enumerate(totals):
                store(builder, added_up(builder, builder.load(total)), builder.add(sums, I64(4 * number)))
            return target.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return multiply


_one, _two, _three, _four = map(_products, range(1, _BLOCK + 1))


@part
def _multiply(rows, size, tokens, first, count, sums):
    """Write sums [count, 4]: four rows of `size` numbers times tokens `first` and following of `_by_blocks`."""
    steps, x, out = size // STEP, tokens.ctypes.data + 2 * first * size, sums.ctypes.data
    following = rows + 2 * _ROWS * size if first == 0 else rows
    if count == 4:
        _four(rows, steps, x, following, out)
    elif count == 3:
        _three(rows, steps, x, following, out)
    elif count == 2:
        _two(rows, steps, x, following, out)
    else:
        _one(rows, steps, x, following, out)


@part
def _place(i, first, token, count, size):
    """Where number i of a token of `size` is, number `token` of the block of `count` that begins with `first`."""
    return first * size + (i // STEP * count + token) * STEP + i % STEP


@part
def _by_blocks(x):
    """x [T, size] as `_products` reads it."""
    num_tokens, size = x.shape
    out = np.empty(num_tokens * size, x.dtype)
    for first in range(0, num_tokens, _BLOCK):
        count = min(_BLOCK, num_tokens - first)
        for token in range(count):
            for start in range(0, size, STEP):
                place = _place(start, first, token, count, size)
                for i in range(STEP):
                    out[place + i] = x[first + token, start + i]
    return out


@kernel("void(int64, int64, int64, uint16[:, ::1], uint16[:, ::1])", nogil=True)
def compute_whole(inner, down, num_neurons, x, out):
    """Write out [T, H]: an expert on x [T, H]. Gate and up lie at address `inner` as [2 I, H], down at `down` as
    [H, I]."""
    num_tokens, hidden = x.shape
    tokens, acts = _by_blocks(x), np.empty(num_tokens * num_neurons, np.uint16)
    sums, others = np.empty((_BLOCK, _ROWS), np.float32), np.empty((_BLOCK, _ROWS), np.float32)
    for n in range(0, num_neurons, _ROWS):
        gate, up = inner + 2 * hidden * n, inner + 2 * hidden * (num_neurons + n)
        for first in range(0, num_tokens, _BLOCK):
            count = min(_BLOCK, num_tokens - first)
            _multiply(gate, hidden, tokens, first, count, sums)
            _multiply(up, hidden, tokens, first, count, others)
            for token in range(count):
                place = _place(n, first, token, count, num_neurons)
                for row in range(_ROWS):
                    acts[place + row] = as_stored(swiglu(sums[token, row], others[token, row], out), acts)
    for h in range(0, hidden, _ROWS):
        for first in range(0, num_tokens, _BLOCK):
            count = min(_BLOCK, num_tokens - first)
            _multiply(down + 2 * num_neurons * h, num_neurons, acts, first, count, sums)
            for token in range(count):
                for row in range(_ROWS):
                    out[first + token, h + row] = as_stored(rounded(sums[token, row], out), out)
