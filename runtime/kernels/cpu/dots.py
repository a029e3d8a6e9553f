"""Dot products of a row of weights with one token or up to four, in which each token's sum has the
same order whatever other tokens there are. Importing this module imports numba.

A sum is taken in four vectors of 16 lanes in turn, which are added up at the end: bfloat16 by pairs
where the processor multiplies them, otherwise after widening. The row is read once for all tokens.
"""

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.float16 import float16_as_float
from artifacts.common.llvm_vectors import I16, I64, advanced, filled, load, store, vector
from runtime.kernels.cpu.lanes import (
    AHEAD,
    LANES,
    NUMBERS,
    PAIRS,
    SUMS,
    add_pairs,
    added_up,
    each_added_up,
    prefetch,
)
from runtime.kernels.cpu.published.pairs import HAS_BFDOT, add_by_bfdot

MOST = 4  # tokens at once: their sums stay in registers
_TURNS = 4
_NBYTES = 64  # of a vector of x
_HALVES = vector(I16, LANES)
_CONTRACT = ("contract",)


def _plus_product(builder: ir.IRBuilder, sums: ir.Value, row: ir.Value, x: ir.Value) -> ir.Value:
    """Add products like `lanes.plus_product`, in an order that LLVM must keep."""
    return builder.fadd(sums, builder.fmul(row, x, flags=_CONTRACT), flags=_CONTRACT)


def _from_bfloat16(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    return builder.bitcast(builder.shl(builder.zext(halves, PAIRS), filled(PAIRS, 16)), SUMS)


def _as_they_are(builder: ir.IRBuilder, numbers: ir.Value) -> ir.Value:
    return numbers


def _ways(stored: types.Type, factor: types.Type) -> tuple[ir.Type, Callable, ir.Type, Callable]:
    """Return the vectors of a row and of x for numbers of these types, how a row's are widened, and
    how products are added."""
    if factor == types.uint16:
        return NUMBERS, _as_they_are, NUMBERS, add_by_bfdot if HAS_BFDOT else add_pairs
    if stored == types.float32:
        return SUMS, _as_they_are, SUMS, _plus_product
    widen = float16_as_float if stored == types.int16 else _from_bfloat16
    return _HALVES, widen, SUMS, _plus_product


def _dots(num_tokens: int) -> Callable[..., None]:
    """Return `multiply(row, x, stride, steps, sums, stored, factors)`, which writes the products of
    a row with tokens that lie `stride` bytes apart, float32, up to the next power of two. Operands
    are int64 addresses, and two arrays of the types of weights and of x."""

    @intrinsic
    def multiply(context, row, x, stride, steps, sums, stored, factors):
        row_kind, widen, x_kind, add = _ways(stored.dtype, factors.dtype)
        nbytes = _NBYTES if row_kind != _HALVES else _NBYTES // 2

        def generate(target, builder, signature, arguments):
            row, x, stride, steps, sums, _, _ = arguments
            starts = [advanced(builder, x, I64(t), stride) for t in range(num_tokens)]
            totals = [
                [cgutils.alloca_once_value(builder, filled(SUMS, 0.0)) for _ in range(num_tokens)]
                for _ in range(_TURNS)
            ]

            def add_step(own: list[ir.Value], step: ir.Value, turn: int) -> None:
                place = advanced(builder, row, step, nbytes)
                numbers = widen(builder, load(builder, place, row_kind, nbytes * turn))
                for total, start in zip(own, starts, strict=True):
                    token = advanced(builder, start, step, _NBYTES)
                    factor = load(builder, token, x_kind, _NBYTES * turn)
                    builder.store(add(builder, builder.load(total), numbers, factor), total)

            groups = builder.sdiv(steps, I64(_TURNS))
            with cgutils.for_range(builder, groups, intp=I64) as loop:
                step = builder.mul(loop.index, I64(_TURNS))
                place = advanced(builder, row, step, nbytes)
                for line in range(0, nbytes * _TURNS, 64):
                    prefetch(builder, place, AHEAD + line)
                for turn, own in enumerate(totals):
                    add_step(own, step, turn)
            done = builder.mul(groups, I64(_TURNS))
            with cgutils.for_range(builder, builder.sub(steps, done), intp=I64) as loop:
                add_step(totals[0], builder.add(done, loop.index), 0)
            vectors = [_sum(builder, own) for own in zip(*totals, strict=True)]
            if num_tokens == 1:
                store(builder, added_up(builder, vectors[0]), sums)
            else:
                vectors += vectors[: num_tokens % 2]
                store(builder, each_added_up(builder, vectors), sums)
            return target.get_dummy_value()

        return types.void(*[types.int64] * 5, stored, factors), generate

    return multiply


def _sum(builder: ir.IRBuilder, totals: tuple[ir.Value, ...]) -> ir.Value:
    first, *others = map(builder.load, totals)
    for other in others:
        first = builder.fadd(first, other)
    return first


dots_of_1, dots_of_2, dots_of_3, dots_of_4 = map(_dots, range(1, MOST + 1))
