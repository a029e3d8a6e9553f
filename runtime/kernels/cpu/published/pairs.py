"""Dot products of bfloat16, summed in float32 by the processor's own instructions, which multiply
pairs: `vdpbf16ps` of x86 with AVX-512, `bfdot` of Arm.

Both take numbers below 2**-126 for zero and raise no exceptions; x86 rounds sums to the nearest,
ties to even, Arm to odd. Importing this module imports numba.
"""

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import F32, FEATURES, I64, advanced, called, filled, load, vector
from runtime.kernels.cpu.lanes import (
    AHEAD,
    HAS_PAIRS,
    LANES,
    NUMBERS,
    SUMS,
    BFloat,
    add_pairs,
    added_up,
    prefetch,
)

HAS_BFDOT = "bf16" in FEATURES
HAS_DOT = HAS_PAIRS or HAS_BFDOT
"""True if `dot` is the processor's own; if not, LLVM writes it out, which is right and slow."""

STEP = 2 * LANES  # numbers in a vector
_AT_ONCE = 4  # vectors, so that the sums of one need not wait for those of another

Add = Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]  # sums, numbers, x -> sums


@intrinsic
def dot(context, row, x, steps):
    """Return the product of a row with x, both of `steps` vectors at int64 addresses."""

    def generate(target, builder, signature, arguments):
        return write_dot(builder, *arguments, add_by_bfdot if HAS_BFDOT else add_pairs)

    return types.float32(*[types.int64] * 3), generate


def write_dot(
    builder: ir.IRBuilder, row: ir.Value, x: ir.Value, steps: ir.Value, add: Add
) -> ir.Value:
    """Write the code of `dot`, in which `add` adds products of pairs."""

    def add_step(total: ir.Value, places: Sequence[ir.Value], offset: int) -> None:
        numbers, own = (load(builder, place, NUMBERS, offset) for place in places)
        builder.store(add(builder, builder.load(total), numbers, own), total)

    sums = [cgutils.alloca_once_value(builder, filled(SUMS, 0.0)) for _ in range(_AT_ONCE)]
    groups = builder.sdiv(steps, I64(_AT_ONCE))
    with cgutils.for_range(builder, groups, intp=I64) as loop:
        places = [advanced(builder, start, loop.index, 2 * STEP * _AT_ONCE) for start in (row, x)]
        for line in range(0, 2 * STEP * _AT_ONCE, 64):
            prefetch(builder, places[0], AHEAD + line)
        for turn, total in enumerate(sums):
            add_step(total, places, 2 * STEP * turn)
    done = builder.mul(groups, I64(_AT_ONCE))
    with cgutils.for_range(builder, builder.sub(steps, done), intp=I64) as loop:
        step = builder.add(done, loop.index)
        add_step(sums[0], [advanced(builder, start, step, 2 * STEP) for start in (row, x)], 0)
    first, *others = map(builder.load, sums)
    for other in others:
        first = builder.fadd(first, other)
    return added_up(builder, first)


def add_by_bfdot(builder: ir.IRBuilder, sums: ir.Value, numbers: ir.Value, x: ir.Value) -> ir.Value:
    """Add products like `add_pairs`, in Arm's vectors of four sums."""
    parts = []
    for first in range(0, LANES, 4):
        own = _part(builder, sums, first, 4)
        operands = [
            builder.bitcast(_part(builder, each, 2 * first, 8), vector(BFloat(), 8))
            for each in (numbers, x)
        ]
        parts.append(
            called(
                builder, "llvm.aarch64.neon.bfdot.v4f32.v8bf16", vector(F32, 4), [own, *operands]
            )
        )
    low, high = (_joined(builder, *parts[half : half + 2]) for half in (0, 2))
    return _joined(builder, low, high)


def _part(builder: ir.IRBuilder, values: ir.Value, first: int, count: int) -> ir.Value:
    return builder.shuffle_vector(values, values, _lanes(range(first, first + count)))


def _joined(builder: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    return builder.shuffle_vector(low, high, _lanes(range(2 * low.type.count)))


def _lanes(lanes: Sequence[int]) -> ir.Constant:
    return ir.Constant(vector(ir.IntType(32), len(lanes)), list(lanes))
