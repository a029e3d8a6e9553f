"""Products of 4-bit codes, eight outputs of one input in a word (AWQ), with one token as digits:
`column_vectors` for words that lie across the outputs. Operands are int64 addresses. Importing this
module imports numba.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import I8, I32, I64, advanced, filled, load, splat, store, vector
from artifacts.formats.awq import ORDER
from runtime.kernels.cpu.column_vectors import DIGITS, UNIT, add_quads, scaled
from runtime.kernels.cpu.lanes import LANES, PAIRS, chosen, prefetch

OUTPUTS = LANES * len(ORDER)  # whose sums are kept in registers
_VECTORS = range(OUTPUTS // LANES)
_BYTES = vector(I8, 4 * LANES)

# Four rows of words become vectors w of 16 words, which have four codes of the same place in each
# half of their bytes: lane 4 L + j has byte j of word 4 L + w. The sum numbered `w0 n w1`, in bits,
# belongs to vector w = `w1 w0` and half n.


@intrinsic
def add_output_words(context, words, stride, x, sums):
    """Add a unit of rows of words, `stride` bytes apart, to the sums of 16 words, int32 [8, 2, 16],
    and prefetch the unit under it. `in_order` puts the sums in order. x has the unit's digits [2,
    32]."""

    def generate(target, builder, signature, arguments):
        words, stride, x, sums = arguments
        addresses = [builder.add(sums, I64(64 * i)) for i in range(DIGITS * len(_VECTORS))]
        totals = [
            cgutils.alloca_once_value(builder, load(builder, address, PAIRS))
            for address in addresses
        ]
        under = builder.mul(stride, I64(UNIT))
        with cgutils.for_range(builder, I64(UNIT // 4), intp=I64) as loop:
            first = advanced(builder, words, loop.index, builder.mul(stride, I64(4)))
            rows = [advanced(builder, first, I64(row), stride) for row in range(4)]
            for row in rows:
                prefetch(builder, builder.add(row, under), cache=2)
            own_x = advanced(builder, x, loop.index, 4)
            digits = [
                splat(builder, load(builder, own_x, I32, UNIT * digit)) for digit in range(DIGITS)
            ]
            quads = _transposed(builder, [load(builder, row, _BYTES) for row in rows])
            for i in _VECTORS:
                codes = builder.lshr(quads[i % 2 * 2 + i // 4], filled(PAIRS, i // 2 % 2 * 4))
                codes = builder.and_(codes, filled(PAIRS, 0x0F0F0F0F))
                for digit, total in zip(digits, totals[DIGITS * i :], strict=False):
                    builder.store(add_quads(builder, builder.load(total), codes, digit), total)
        for total, address in zip(totals, addresses, strict=True):
            store(builder, builder.load(total), address)
        return target.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def _transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Return vectors w: the bytes of four rows side by side, of words 4 L + w."""
    pairs = [_zipped(builder, *rows[first : first + 2], num_lanes=16) for first in (0, 2)]
    wide = [[builder.bitcast(half, vector(ir.IntType(16))) for half in pair] for pair in pairs]
    quads = [
        quad
        for half in range(2)
        for quad in _zipped(builder, wide[0][half], wide[1][half], num_lanes=8)
    ]
    return [builder.bitcast(quad, PAIRS) for quad in quads]


@intrinsic
def in_order(context, sums, num_blocks):
    """Put the sums of blocks of 16 words in the order of their outputs."""
    lanes = [
        lane % 2 * 8 + lane // 4 % 2 * 4 + lane // 8 * 2 + lane // 2 % 2 for lane in range(LANES)
    ]

    def generate(target, builder, signature, arguments):
        sums, num_blocks = arguments
        with cgutils.for_range(builder, num_blocks, intp=I64) as loop:
            own = advanced(builder, sums, loop.index, 4 * DIGITS * OUTPUTS)
            for digit in range(DIGITS):
                places = [builder.add(own, I64(64 * (DIGITS * i + digit))) for i in _VECTORS]
                values = [load(builder, place, PAIRS) for place in places]
                for _ in range(2):
                    pairs = zip(values[:4], values[4:], strict=True)
                    values = [
                        half for pair in pairs for half in _zipped(builder, *pair, num_lanes=LANES)
                    ]
                for i, place in enumerate(places):
                    store(builder, chosen(builder, *[values[i % 2 * 4 + i // 2]] * 2, lanes), place)
        return target.get_dummy_value()

    return types.void(*[types.int64] * 2), generate


def _zipped(
    builder: ir.IRBuilder, first: ir.Value, second: ir.Value, *, num_lanes: int
) -> list[ir.Value]:
    """Return two vectors interleaved lane by lane, in parts of `num_lanes` lanes: the first halves
    of all parts, and the second."""
    count = first.type.count
    half = num_lanes // 2
    lanes = [
        [start + lane for start in range(first, count, num_lanes) for lane in range(half)]
        for first in (0, half)
    ]
    return [
        chosen(builder, first, second, [at for lane in own for at in (lane, lane + count)])
        for own in lanes
    ]


add_scaled_output_words = scaled(4, np.argsort(ORDER))
