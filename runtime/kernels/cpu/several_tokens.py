"""Whole gated experts in 16 bits on a few tokens, compiled by numba: each weight is read from
memory once for all.

Rows are multiplied by fours, by up to four tokens at a time: each vector of weights and of x serves
four products. More tokens find the rows in the cache. bfloat16 is multiplied by pairs, float16
after widening, with x in float32. Rounding is that of `runtime.kernels.cpu.gated`. Importing this
module imports numba.

Shapes: T tokens, H hidden, I neurons; H and I are multiples of `STEP`. A vector is of 32 numbers in
bfloat16, of 16 in float16 and float32.
"""

from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from artifacts.common.float16 import float16_as_float
from artifacts.common.llvm_vectors import I16, I64, advanced, filled, load, store, vector
from artifacts.common.numba_loops import kernel, part
from runtime.kernels.cpu.gated import as_float, as_stored, rounded, swiglu
from runtime.kernels.cpu.lanes import (
    LANES,
    NUMBERS,
    SUMS,
    add_pairs,
    added_up,
    plus_product,
    prefetch,
)
from runtime.kernels.cpu.published.pairs import STEP

# rows and tokens that are multiplied at once: their sums stay in registers
_ROWS = 4
_BLOCK = 4
_NBYTES = 2 * STEP  # of a vector of x
_LINE = 64  # bytes that a prefetch asks for


def _products(num_tokens: int) -> Callable[..., None]:
    """Return `multiply(rows, steps, x, following, sums, like)`, which multiplies four adjacent rows
    by `num_tokens` tokens.

    Rows and tokens are of `steps` vectors; the vectors of the tokens alternate. It writes sums
    [num_tokens, 4] float32, and prefetches the rows at `following` meanwhile. Operands are int64
    addresses; `like` is an array of the tokens' type, uint16 for rows in bfloat16 and float32 for
    rows in float16.
    """

    @intrinsic
    def multiply(context, rows, steps, x, following, sums, like):
        are_pairs = like.dtype == types.uint16
        stored, numbers_of_x = (NUMBERS, NUMBERS) if are_pairs else (vector(I16, LANES), SUMS)
        add = add_pairs if are_pairs else _add_widened
        nbytes = 2 * stored.count

        def generate(target, builder, signature, arguments):
            rows, steps, x, following, sums, _ = arguments
            stride = builder.mul(steps, I64(nbytes))
            starts = [advanced(builder, rows, I64(row), stride) for row in range(_ROWS)]
            totals = [
                cgutils.alloca_once_value(builder, filled(SUMS, 0.0))
                for _ in range(_ROWS * num_tokens)
            ]
            with cgutils.for_range(builder, steps, intp=I64) as loop:
                place = advanced(builder, x, loop.index, _NBYTES * num_tokens)
                coming = advanced(builder, following, loop.index, nbytes * _ROWS)
                own = [
                    load(builder, place, numbers_of_x, _NBYTES * token)
                    for token in range(num_tokens)
                ]
                for offset in range(0, nbytes * _ROWS, _LINE):
                    prefetch(builder, coming, offset, cache=2)
                for row, start in enumerate(starts):
                    numbers = load(builder, advanced(builder, start, loop.index, nbytes), stored)
                    for token, total in zip(own, totals[row::_ROWS], strict=True):
                        builder.store(add(builder, builder.load(total), numbers, token), total)
            for number, total in enumerate(totals):
                store(
                    builder,
                    added_up(builder, builder.load(total)),
                    builder.add(sums, I64(4 * number)),
                )
            return target.get_dummy_value()

        return types.void(*[types.int64] * 5, like), generate

    return multiply


def _add_widened(builder: ir.IRBuilder, sums: ir.Value, halves: ir.Value, x: ir.Value) -> ir.Value:
    return plus_product(builder, sums, float16_as_float(builder, halves), x)


_one, _two, _three, _four = map(_products, range(1, _BLOCK + 1))


@part
def _multiply(rows, size, tokens, first, count, sums):
    """Write sums [count, 4]: four rows of `size` numbers times `count` tokens from `first` on, in
    the layout of `_by_blocks`."""
    steps = size // _lanes(tokens)
    x = tokens.ctypes.data + tokens.itemsize * first * size
    following = rows + 2 * _ROWS * size if first == 0 else rows
    out = sums.ctypes.data
    if count == 4:
        _four(rows, steps, x, following, out, tokens)
    elif count == 3:
        _three(rows, steps, x, following, out, tokens)
    elif count == 2:
        _two(rows, steps, x, following, out, tokens)
    else:
        _one(rows, steps, x, following, out, tokens)


def _room(count, like):
    """Return an array for the factors of weights of this type: uint16 for bfloat16, otherwise
    float32."""


@overload(_room, inline="always")
def _typed_room(count, like):
    dtype = np.uint16 if like.dtype == types.uint16 else np.float32
    return lambda count, like: np.empty(count, dtype)


@part
def _lanes(tokens):
    """Return how many numbers of these tokens a vector has."""
    return _NBYTES // tokens.itemsize


@part
def _place(i, first, token, count, size, lanes):
    """Return the place of number i of a token of `size` numbers, which is number `token` of the
    block of `count` tokens that begins with token `first`."""
    return first * size + (i // lanes * count + token) * lanes + i % lanes


@part
def _by_blocks(x):
    """Return x [T, size] in the layout that `_products` reads."""
    num_tokens, size = x.shape
    out = _room(num_tokens * size, x)
    lanes = _lanes(out)
    for first in range(0, num_tokens, _BLOCK):
        count = min(_BLOCK, num_tokens - first)
        for token in range(count):
            for start in range(0, size, lanes):
                place = _place(start, first, token, count, size, lanes)
                for i in range(lanes):
                    out[place + i] = as_stored(as_float(x[first + token, start + i]), out)
    return out


@kernel(
    [f"void(int64, int64, int64, {kind}[:, ::1], {kind}[:, ::1])" for kind in ("uint16", "int16")],
    nogil=True,
)
def compute_whole(inner, down, num_neurons, x, out):
    """Write out [T, H]: an expert on x [T, H]. Gate and up lie at address `inner` as [2 I, H], down
    at `down` as [H, I]."""
    num_tokens, hidden = x.shape
    tokens = _by_blocks(x)
    acts = _room(num_tokens * num_neurons, x)
    sums = np.empty((_BLOCK, _ROWS), np.float32)
    others = np.empty((_BLOCK, _ROWS), np.float32)
    for n in range(0, num_neurons, _ROWS):
        gate = inner + 2 * hidden * n
        up = inner + 2 * hidden * (num_neurons + n)
        for first in range(0, num_tokens, _BLOCK):
            count = min(_BLOCK, num_tokens - first)
            _multiply(gate, hidden, tokens, first, count, sums)
            _multiply(up, hidden, tokens, first, count, others)
            for token in range(count):
                place = _place(n, first, token, count, num_neurons, _lanes(acts))
                for row in range(_ROWS):
                    acts[place + row] = as_stored(
                        swiglu(sums[token, row], others[token, row], out), acts
                    )
    for h in range(0, hidden, _ROWS):
        for first in range(0, num_tokens, _BLOCK):
            count = min(_BLOCK, num_tokens - first)
            _multiply(down + 2 * num_neurons * h, num_neurons, acts, first, count, sums)
            for token in range(count):
                for row in range(_ROWS):
                    out[first + token, h + row] = as_stored(rounded(sums[token, row], out), out)
