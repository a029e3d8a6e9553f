"""Products with one token of codes of 2 to 8 bits that lie side by side for adjacent outputs. They
are written in vectors, because LLVM would not find these in loops.

The token is in whole numbers of 16 bits, as two digits of 8 bits. One instruction takes four codes
of each of 16 outputs out of their words, and another adds up their products with four digits,
without rounding. Rows are read in strips, which a processor does not fetch in advance: each strip
prefetches the one under it. Operands are int64 addresses. Importing this module imports numba.
"""

from collections.abc import Sequence
from functools import partial, reduce

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import (
    I8,
    I16,
    I32,
    I64,
    advanced,
    called,
    filled,
    load,
    splat,
    spread,
    store,
    vector,
)
from runtime.kernels.cpu.lanes import (
    HAS_QUADS,
    LANES,
    PAIRS,
    SUMS,
    plus_product,
    prefetch,
    switched,
)

PANEL = 64  # outputs whose sums are kept in registers, one a word
# inputs that are multiplied at once, whose codes are in as many rows of words as a code has bits
UNIT = 32
DIGITS = 2  # of a number of the token
_QUADS = UNIT // 4
_WIDTHS = (2, 3, 4, 8)
_BYTES = vector(I8, 4 * LANES)


def quad_of(builder: ir.IRBuilder, rows: Sequence[ir.Value], bits: int, quad: int) -> ir.Value:
    """Return four codes of each output as bytes, for the inputs that `inputs_of_quads` names."""
    if bits == 3:
        codes = _three_bits(builder, rows, 12 * quad)
    else:
        row, place = divmod(quad, 8 // bits)
        codes = builder.lshr(rows[row], filled(PAIRS, bits * place)) if place else rows[row]
    return builder.bitcast(
        builder.and_(builder.bitcast(codes, _BYTES), filled(_BYTES, (1 << bits) - 1)), PAIRS
    )


def _three_bits(builder: ir.IRBuilder, rows: Sequence[ir.Value], first: int) -> ir.Value:
    """Return the codes from this bit of three words on as the low bits of bytes."""
    row, first = divmod(first, 32)
    words = rows[row]
    if first > 20:
        words = called(
            builder, "llvm.fshr.v16i32", PAIRS, [rows[row + 1], words, filled(PAIRS, first)]
        )
        first = 0
    if HAS_QUADS:
        places = [half + first + 3 * code for half in (0, 32) for code in range(4)]
        operands = [ir.Constant(_BYTES, places * (LANES // 2)), builder.bitcast(words, _BYTES)]
        return called(builder, "llvm.x86.avx512.pmultishift.qb.512", _BYTES, operands)
    shifted = [builder.lshr(words, filled(PAIRS, first + 3 * code)) for code in range(4)]
    wide = [
        builder.shl(builder.and_(own, filled(PAIRS, 7)), filled(PAIRS, 8 * i))
        for i, own in enumerate(shifted)
    ]
    return reduce(builder.or_, wide)


def inputs_of_quads(bits: int) -> list[int]:
    """Return the inputs [32] of a unit by quads: at 3 bits they lie side by side, otherwise at the
    same place of each byte."""
    if bits == 3:
        return list(range(UNIT))
    per_byte = 8 // bits
    return [
        4 * per_byte * row + per_byte * byte + place
        for row in range(bits)
        for place in range(per_byte)
        for byte in range(4)
    ]


@intrinsic
def arrange(context, bits, digits, num_units):
    """Put the digits of units in the order of their quads."""

    def generate(target, builder, signature, arguments):
        bits, digits, num_units = arguments

        def write(width: int) -> None:
            order = [
                UNIT * digit + place for digit in range(DIGITS) for place in inputs_of_quads(width)
            ]
            with cgutils.for_range(builder, num_units, intp=I64) as loop:
                own = advanced(builder, digits, loop.index, DIGITS * UNIT)
                store(builder, spread(builder, load(builder, own, _BYTES), order), own)

        # at 3 and 8 bits they are in this order
        switched(builder, bits, {width: partial(write, width) for width in (2, 4)})
        return target.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


def add_quads(builder: ir.IRBuilder, sums: ir.Value, codes: ir.Value, digits: ir.Value) -> ir.Value:
    """Add the products of four unsigned codes with four digits to each sum."""
    if HAS_QUADS:
        return called(builder, "llvm.x86.avx512.vpdpbusd.512", PAIRS, [sums, codes, digits])
    for byte in range(4):
        code = builder.and_(builder.lshr(codes, filled(PAIRS, 8 * byte)), filled(PAIRS, 0xFF))
        digit = builder.ashr(builder.shl(digits, filled(PAIRS, 24 - 8 * byte)), filled(PAIRS, 24))
        sums = builder.add(sums, builder.mul(code, digit))
    return sums


@intrinsic
def add_units(context, bits, words, stride, x, num_units, sums):
    """Add `num_units` units of rows of words, `stride` bytes apart, to `PANEL` sums, and prefetch
    the units under them. x [units, 2, 32] has the digits; sums [PANEL / 16, 2, 16], int32, are by
    blocks of 16 outputs."""

    def generate(target, builder, signature, arguments):
        bits, *operands = arguments
        cases = {width: partial(_write_units, builder, width, *operands) for width in _WIDTHS}
        switched(builder, bits, cases)
        return target.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _write_units(
    builder: ir.IRBuilder,
    bits: int,
    words: ir.Value,
    stride: ir.Value,
    x: ir.Value,
    num_units: ir.Value,
    sums: ir.Value,
) -> None:
    """Write the code of `add_units` for codes of this width."""
    num_blocks = PANEL // LANES
    addresses = [builder.add(sums, I64(64 * i)) for i in range(DIGITS * num_blocks)]
    totals = [
        cgutils.alloca_once_value(builder, load(builder, address, PAIRS)) for address in addresses
    ]
    unit_nbytes = builder.mul(stride, I64(bits))
    under = builder.mul(unit_nbytes, num_units)
    with cgutils.for_range(builder, num_units, intp=I64) as loop:
        unit = advanced(builder, words, loop.index, unit_nbytes)
        own_x = advanced(builder, x, loop.index, 64)
        rows = [advanced(builder, unit, I64(row), stride) for row in range(bits)]
        own = [
            [load(builder, row, PAIRS, 64 * block) for row in rows] for block in range(num_blocks)
        ]
        for row in rows:
            for block in range(num_blocks):
                prefetch(builder, builder.add(row, builder.add(under, I64(64 * block))), cache=2)
        for quad in range(_QUADS):
            digits = [
                splat(builder, load(builder, own_x, I32, UNIT * digit + 4 * quad))
                for digit in range(DIGITS)
            ]
            for block, words_of_block in enumerate(own):
                codes = quad_of(builder, words_of_block, bits, quad)
                for digit, total in zip(digits, totals[DIGITS * block :], strict=False):
                    builder.store(add_quads(builder, builder.load(total), codes, digit), total)
    for total, address in zip(totals, addresses, strict=True):
        store(builder, builder.load(total), address)


@intrinsic
def add_scaled(context, bits, zeros, zero_offset, scales, worth, sum_x, num_blocks, sums, y):
    """Add blocks of sums of 16 outputs times their scales times `worth` to y. A zero-point is the
    stored one plus `zero_offset`."""

    def generate(target, builder, signature, arguments):
        bits, zeros, zero_offset, scales, worth, sum_x, num_blocks, sums, y = arguments
        zero_offset = splat(builder, builder.trunc(zero_offset, I32))
        worth = splat(builder, worth)
        less_x = splat(builder, builder.fneg(sum_x))

        def write(width: int) -> None:
            with cgutils.for_range(builder, num_blocks, intp=I64) as loop:
                place = advanced(builder, zeros, loop.index, 2 * width)
                zero = _zeros_at(builder, width, place, zero_offset)
                own = advanced(builder, sums, loop.index, 64 * DIGITS)
                out = advanced(builder, y, loop.index, 64)
                high, low = (
                    builder.sitofp(load(builder, own, PAIRS, 64 * digit), SUMS)
                    for digit in range(DIGITS)
                )
                total = plus_product(builder, low, high, filled(SUMS, 256.0))
                total = plus_product(builder, total, zero, less_x)
                scale = load(builder, advanced(builder, scales, loop.index, 64), SUMS)
                scale = builder.fmul(scale, worth)
                store(builder, plus_product(builder, load(builder, out, SUMS), scale, total), out)

        switched(builder, bits, {width: partial(write, width) for width in _WIDTHS})
        return target.get_dummy_value()

    numbers = [types.int64] * 4 + [types.float32] * 2 + [types.int64] * 3
    return types.void(*numbers), generate


def _zeros_at(
    builder: ir.IRBuilder, bits: int, address: ir.Value, zero_offset: ir.Value
) -> ir.Value:
    """Return the zero-points of 16 outputs, which lie side by side, as float32."""
    places = [bits * lane for lane in range(LANES)]
    bytes_ = [byte for place in places for byte in (place // 8, min(place // 8 + 1, 2 * bits - 1))]
    stored = spread(builder, load(builder, address, vector(I8, 2 * bits)), bytes_)
    wide = builder.zext(builder.bitcast(stored, vector(I16, LANES)), PAIRS)
    codes = builder.lshr(wide, ir.Constant(PAIRS, [place % 8 for place in places]))
    codes = builder.and_(builder.add(codes, zero_offset), filled(PAIRS, (1 << bits) - 1))
    return builder.sitofp(codes, SUMS)
