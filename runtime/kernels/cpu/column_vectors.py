"""Products of codes of 2 to 4 bits that lie side by side for adjacent outputs with one token in bfloat16, written in
vectors, which LLVM would not find in loops.

One instruction looks up the numbers of 32 codes in a table, and another adds up the products of pairs: the codes in the
low and the high half of a word. Rows are read in strips, for which the processor fetches nothing in advance: the strip
that is next but for the other panels is asked for. Operands are int64 addresses. Importing this module imports numba.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.formats.awq import ORDER
from runtime.kernels.cpu.lanes import (
    I8,
    I16,
    I32,
    I64,
    LANES,
    NUMBERS,
    PAIRS,
    SUMS,
    add_pairs,
    advanced,
    called,
    filled,
    load,
    looked_up,
    plus_product,
    prefetch,
    splat,
    spread,
    store,
    vector,
)

PANEL = 64  # outputs whose sums are kept in registers, one a word
UNIT_INPUTS = 32  # whose codes are in so many rows of words, by width, and are multiplied at once:
UNIT_ROWS = (0, 0, 2, 3, 4)
MIDDLE_8 = 136  # of codes of 8 bits, whose halves are less 8 and 16 times 8
_WIDTHS = (2, 3, 4)

Unpacked = Iterator[tuple[ir.Value, Sequence[int]]]  # words, and the bit of a code in each half of them


def _halves(bits: int, rows: Sequence[ir.Value]) -> Unpacked:
    """The pairs of codes in rows of words, of a width that divides 16."""
    for row in rows:
        for shift in range(0, 16, bits):
            yield row, (shift, shift)


def _three_bits(builder: ir.IRBuilder, rows: Sequence[ir.Value]) -> Unpacked:
    """The pairs of codes in three rows of words; six codes are no pairs of the same word as they lie."""
    for row, (first, second), count in zip(rows, ((0, 2), (1, 0), (2, 1)), (4, 5, 4), strict=True):
        for shift in range(0, 3 * count, 3):
            yield row, (first + shift, second + shift)
    a, b, c = rows
    yield _turned(builder, a, a, 31), (13, 0)
    yield _turned(builder, c, c, 1), (13, 12)
    yield _one_of_each(builder, _turned(builder, b, a, 30), _turned(builder, c, b, 15)), (0, 0)


def unit_order(bits: int) -> np.ndarray:
    """The inputs [32] of a unit in the order of its pairs."""
    if bits == 3:
        pairs = [*_runs(0, 6, 4), *_runs(11, 16, 5), *_runs(22, 27, 4), (4, 5), (26, 31), (10, 21)]
    else:
        half = 16 // bits
        pairs = [pair for first in range(0, UNIT_INPUTS, 2 * half) for pair in _runs(first, first + half, half)]
    return np.array(pairs).ravel()


def _runs(first: int, second: int, count: int) -> list[tuple[int, int]]:
    return [(first + i, second + i) for i in range(count)]


def _turned(builder: ir.IRBuilder, high: ir.Value, low: ir.Value, shift: int) -> ir.Value:
    """The 32 bits from this bit on of words of 64 bits."""
    return called(builder, "llvm.fshr.v16i32", PAIRS, [high, low, filled(PAIRS, shift)])


def _one_of_each(builder: ir.IRBuilder, first: ir.Value, second: ir.Value) -> ir.Value:
    """The low halves of the first words beside the high halves of the second."""
    low, high = builder.and_(first, filled(PAIRS, 0xFFFF)), builder.and_(second, filled(PAIRS, 0xFFFF0000))
    return builder.or_(low, high)


def _shifted(builder: ir.IRBuilder, words: ir.Value, shifts: Sequence[int]) -> ir.Value:
    """Each half of the words shifted to the right by its number of bits."""
    return builder.lshr(builder.bitcast(words, NUMBERS), ir.Constant(NUMBERS, [*shifts] * LANES))


def _stream(bits: int) -> Callable[..., None]:
    """Return `add(words, stride, x, table, num_units, sums)`: it adds so many units of rows of words, `stride` bytes
    apart, to `PANEL` sums, and asks for the units behind them. x has `UNIT_INPUTS` numbers for each, in their order."""

    @intrinsic
    def add(context, words, stride, x, table, num_units, sums):
        def generate(target, builder, signature, arguments):
            words, stride, x, table, num_units, sums = arguments
            table = load(builder, table, NUMBERS)
            addresses = [builder.add(sums, I64(64 * block)) for block in range(PANEL // LANES)]
            totals = [cgutils.alloca_once_value(builder, load(builder, address, SUMS)) for address in addresses]
            unit_nbytes = builder.mul(stride, I64(UNIT_ROWS[bits]))
            behind = builder.mul(unit_nbytes, num_units)
            with cgutils.for_range(builder, num_units, intp=I64) as loop:
                unit, own_x = advanced(builder, words, loop.index, unit_nbytes), advanced(builder, x, loop.index, 64)
                rows = [advanced(builder, unit, I64(row), stride) for row in range(UNIT_ROWS[bits])]
                pairs = [splat(builder, load(builder, own_x, I32, 4 * pair)) for pair in range(UNIT_INPUTS // 2)]
                for block, total in enumerate(totals):
                    own = [load(builder, row, PAIRS, 64 * block) for row in rows]
                    for row in rows:
                        prefetch(builder, builder.add(row, builder.add(behind, I64(64 * block))))
                    unpacked = _three_bits(builder, own) if bits == 3 else _halves(bits, own)
                    sum_ = builder.load(total)
                    for (halves, shifts), pair in zip(unpacked, pairs, strict=True):
                        numbers = looked_up(builder, table, _shifted(builder, halves, shifts), 0)
                        sum_ = add_pairs(builder, sum_, numbers, builder.bitcast(pair, NUMBERS))
                    builder.store(sum_, total)
            for total, address in zip(totals, addresses, strict=True):
                store(builder, builder.load(total), address)
            return target.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return add


add_units_of_2, add_units_of_3, add_units_of_4 = (_stream(bits) for bits in _WIDTHS)


@intrinsic
def add_output_words(context, words, stride, x, table, num_pairs, sums):
    """Add so many pairs of rows of words, `stride` bytes apart, to 128 sums of 16 words, which `in_order` puts in
    order, and ask for the rows behind them. x has a pair for each."""

    def generate(target, builder, signature, arguments):
        words, stride, x, table, num_pairs, sums = arguments
        table = load(builder, table, NUMBERS)
        addresses = [builder.add(sums, I64(64 * i)) for i in range(8)]
        totals = [cgutils.alloca_once_value(builder, load(builder, address, SUMS)) for address in addresses]
        behind = builder.mul(builder.mul(num_pairs, I64(2)), stride)
        with cgutils.for_range(builder, num_pairs, intp=I64) as loop:
            first = builder.add(words, builder.mul(builder.mul(loop.index, I64(2)), stride))
            rows = [first, builder.add(first, stride)]
            for row in rows:
                prefetch(builder, builder.add(row, behind))
            pair = builder.bitcast(splat(builder, load(builder, advanced(builder, x, loop.index, 4), I32)), NUMBERS)
            halves = _zipped(builder, *(load(builder, row, NUMBERS) for row in rows), num_lanes=8)
            for i, total in enumerate(totals):
                numbers = looked_up(builder, table, halves[i % 2], i // 2 * 4)
                builder.store(add_pairs(builder, builder.load(total), numbers, pair), total)
        for total, address in zip(totals, addresses, strict=True):
            store(builder, builder.load(total), address)
        return target.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def in_order(context, sums, num_blocks):
    """Put the sums of blocks of 16 words in the order of the outputs."""
    kind = vector(I64, LANES // 2)  # two sums, of the same place in both halves of a word, are adjacent outputs

    def generate(target, builder, signature, arguments):
        sums, num_blocks = arguments
        with cgutils.for_range(builder, num_blocks, intp=I64) as loop:
            own = advanced(builder, sums, loop.index, 8 * 64)
            values = [load(builder, own, kind, 64 * i) for i in range(8)]
            for _ in range(2):
                values = [half for i in range(4) for half in _zipped(builder, values[i], values[i + 4], num_lanes=8)]
            for i in range(8):
                store(builder, values[i % 2 * 4 + i // 2], builder.add(own, I64(64 * i)))
        return target.get_dummy_value()

    return types.void(*[types.int64] * 2), generate


def _zipped(builder: ir.IRBuilder, first: ir.Value, second: ir.Value, *, num_lanes: int) -> list[ir.Value]:
    """The lanes of two vectors side by side, in parts of so many lanes: the first halves of the parts, and the second."""
    count = first.type.count
    starts = range(0, count, num_lanes)
    return [
        builder.shuffle_vector(
            first,
            second,
            ir.Constant(
                vector(I32, count),
                [
                    lane + other
                    for start in starts
                    for lane in range(start + half, start + half + num_lanes // 2)
                    for other in (0, count)
                ],
            ),
        )
        for half in (0, num_lanes // 2)
    ]


def _scaled(bits: int, middle: int, order: Sequence[int]) -> Callable[..., None]:
    """Return `add(zeros, zero_offset, scales, sum_x, num_blocks, sums, y)`: it adds blocks of 16 sums of codes less
    `middle` times their scales to y. A zero-point is a stored one plus `zero_offset`; `order` has its place in a word
    for each output of a word."""
    places = [bits * (lane // len(order) * len(order) + order[lane % len(order)]) for lane in range(LANES)]
    bytes_ = [byte for place in places for byte in (place // 8, min(place // 8 + 1, 2 * bits - 1))]

    def zeros_of(builder, address, zero_offset):
        stored = load(builder, address, vector(I8, 2 * bits))
        wide = builder.zext(builder.bitcast(spread(builder, stored, bytes_), vector(I16, LANES)), PAIRS)
        codes = builder.lshr(wide, ir.Constant(PAIRS, [place % 8 for place in places]))
        codes = builder.and_(builder.add(codes, zero_offset), filled(PAIRS, (1 << bits) - 1))
        return builder.sitofp(builder.sub(codes, filled(PAIRS, middle)), SUMS)

    @intrinsic
    def add(context, zeros, zero_offset, scales, sum_x, num_blocks, sums, y):
        def generate(target, builder, signature, arguments):
            zeros, zero_offset, scales, sum_x, num_blocks, sums, y = arguments
            zero_offset, sum_x = splat(builder, builder.trunc(zero_offset, I32)), splat(builder, sum_x)
            with cgutils.for_range(builder, num_blocks, intp=I64) as loop:
                zero = zeros_of(builder, advanced(builder, zeros, loop.index, 2 * bits), zero_offset)
                scale, own, out = (
                    load(builder, advanced(builder, address, loop.index, 64), SUMS) for address in (scales, sums, y)
                )
                own = builder.fsub(own, builder.fmul(zero, sum_x))
                store(builder, plus_product(builder, out, scale, own), advanced(builder, y, loop.index, 64))
            return target.get_dummy_value()

        return types.void(*[types.int64] * 3, types.float32, *[types.int64] * 3), generate

    return add


_AS_STORED = range(LANES)
add_scaled_2, add_scaled_3, add_scaled_4 = (_scaled(bits, 1 << bits - 1, _AS_STORED) for bits in _WIDTHS)
add_scaled_8 = _scaled(8, MIDDLE_8, _AS_STORED)
add_scaled_output_words = _scaled(4, 8, np.argsort(ORDER))
