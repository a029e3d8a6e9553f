"""Products of codes of 4 and 8 bits with one token, written in vectors, which LLVM would not find in loops.

Codes of 4 bits are multiplied with bfloat16: one instruction looks up the numbers of 32 codes in a table, and another
adds up the products of pairs. Operands are int64 addresses. Importing this module imports numba.
"""

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from runtime.kernels.cpu.lanes import (
    F32,
    I8,
    I32,
    I64,
    LANES,
    NUMBERS,
    PAIRS,
    SUMS,
    add_pairs,
    added_up,
    advanced,
    called,
    filled,
    load,
    looked_up,
    plus_product,
    splat,
    store,
    vector,
)

WORD_ROWS, OUTPUT_ROWS = 4, 8  # that are added at once
PANEL = 64  # outputs of `add_pairs_of_codes`


def _row(products: Callable[..., ir.Value]) -> Callable[..., float]:
    """Return `dot(codes, x, scales, num_scales, steps)`: a row of codes times x, in steps of 32 bytes of codes.

    `steps` steps have the same scale, float32. `products` makes the sums of a step from the addresses of its codes and
    its x, which takes 128 bytes.
    """

    @intrinsic
    def dot(context, codes, x, scales, num_scales, steps):
        def generate(target, builder, signature, arguments):
            codes, x, scales, num_scales, steps = arguments
            sums = cgutils.alloca_once_value(builder, filled(SUMS, 0.0))
            with cgutils.for_range(builder, num_scales, intp=I64) as outer:
                scale = splat(builder, load(builder, advanced(builder, scales, outer.index, 4), F32))
                with cgutils.for_range(builder, steps, intp=I64) as inner:
                    step = builder.add(builder.mul(outer.index, steps), inner.index)
                    part = products(builder, advanced(builder, codes, step, 32), advanced(builder, x, step, 128))
                    builder.store(plus_product(builder, builder.load(sums), part, scale), sums)
            return added_up(builder, builder.load(sums))

        return types.float32(*[types.int64] * 5), generate

    return dot


def _bytes(numbers: Callable[[ir.IRBuilder, ir.Value], ir.Value]) -> Callable[..., ir.Value]:
    """32 numbers of 8 bits with x in float32; `numbers` makes float32 of 16 bytes."""

    def products(builder: ir.IRBuilder, codes: ir.Value, x: ir.Value) -> ir.Value:
        sums = filled(SUMS, 0.0)
        for half in range(2):
            own = numbers(builder, load(builder, codes, vector(I8, LANES), LANES * half))
            sums = plus_product(builder, sums, own, load(builder, x, SUMS, 4 * LANES * half))
        return sums

    return products


def _floats(exponent_bits: int) -> Callable[[ir.IRBuilder, ir.Value], ir.Value]:
    """8-bit floats, less a power of two: their bits go where float32 has sign, exponent and mantissa."""
    shift = 16 + exponent_bits
    mask = 0x80000000 | 0x7F << shift

    def numbers(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
        wide = builder.shl(builder.sext(codes, PAIRS), filled(PAIRS, shift))
        return builder.bitcast(builder.and_(wide, filled(PAIRS, mask)), SUMS)

    return numbers


def _signed(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    return builder.sitofp(builder.sext(codes, PAIRS), SUMS)


def _unsigned(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    """Integers without sign, less 128."""
    return _signed(builder, builder.xor(codes, filled(codes.type, 0x80)))


e4m3, e5m2 = _row(_bytes(_floats(4))), _row(_bytes(_floats(5)))
int8, uint8 = _row(_bytes(_signed)), _row(_bytes(_unsigned))


def _words(products: Callable[..., ir.Value]) -> Callable[..., None]:
    """Return `add(words, stride, x, table, num_blocks, sums)`: it adds `WORD_ROWS` rows of words, `stride` bytes apart,
    to 16 sums a block. A word has codes of one output; x has four times 32 bits for a row."""

    @intrinsic
    def add(context, words, stride, x, table, num_blocks, sums):
        def generate(target, builder, signature, arguments):
            words, stride, x, table, num_blocks, sums = arguments
            table = load(builder, table, NUMBERS)
            tokens = [splat(builder, load(builder, x, I32, 4 * place)) for place in range(4 * WORD_ROWS)]
            with cgutils.for_range(builder, num_blocks, intp=I64) as loop:
                own, block = advanced(builder, sums, loop.index, 64), advanced(builder, words, loop.index, 64)
                total = load(builder, own, SUMS)
                for place, token in enumerate(tokens):
                    packed = load(builder, advanced(builder, block, I64(place // 4), stride), PAIRS)
                    total = products(builder, total, table, packed, place % 4, token)
                store(builder, total, own)
            return target.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return add


def _eight_codes(
    builder: ir.IRBuilder, sums: ir.Value, table: ir.Value, words: ir.Value, place: int, x: ir.Value
) -> ir.Value:
    """Codes of 4 bits number `place` and `place` + 4 of each word, with x as a pair."""
    numbers = looked_up(builder, table, builder.bitcast(words, NUMBERS), 4 * place)
    return add_pairs(builder, sums, numbers, builder.bitcast(x, NUMBERS))


def _four_codes(
    builder: ir.IRBuilder, sums: ir.Value, table: ir.Value, words: ir.Value, place: int, x: ir.Value
) -> ir.Value:
    """Codes of 8 bits number `place` of each word, with x in float32."""
    codes = builder.and_(builder.lshr(words, filled(PAIRS, 8 * place)), filled(PAIRS, 0xFF))
    return plus_product(builder, sums, builder.uitofp(codes, SUMS), builder.bitcast(x, SUMS))


add_words_of_eight, add_words_of_four = _words(_eight_codes), _words(_four_codes)


@intrinsic
def add_rows_of_outputs(context, words, stride, x, table, num_blocks, sums):
    """Add `OUTPUT_ROWS` rows of words, `stride` bytes apart, to sums [8, W] float32: place i of word n is sum [i, n]. A
    block is of 16 words; x has `OUTPUT_ROWS` numbers."""

    def generate(target, builder, signature, arguments):
        words, stride, x, table, num_blocks, sums = arguments
        table = load(builder, table, NUMBERS)
        pairs = [splat(builder, load(builder, x, I32, 4 * pair)) for pair in range(OUTPUT_ROWS // 2)]
        with cgutils.for_range(builder, num_blocks, intp=I64) as loop:
            own, block = advanced(builder, sums, loop.index, 64), advanced(builder, words, loop.index, 64)
            places = [advanced(builder, own, I64(place), stride) for place in range(8)]
            totals = [load(builder, place, SUMS) for place in places]
            for pair, token in enumerate(pairs):
                rows = [load(builder, advanced(builder, block, I64(2 * pair + row), stride), PAIRS) for row in (0, 1)]
                for half, packed in enumerate(_interleaved(builder, *rows)):
                    for place in range(4):
                        numbers = looked_up(builder, table, packed, 4 * place)
                        index, x_pair = 4 * half + place, builder.bitcast(token, NUMBERS)
                        totals[index] = add_pairs(builder, totals[index], numbers, x_pair)
            for total, place in zip(totals, places, strict=True):
                store(builder, total, place)
        return target.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _interleaved(builder: ir.IRBuilder, first: ir.Value, second: ir.Value) -> list[ir.Value]:
    """The low halves of two rows of words side by side, and the high halves."""
    sixteen, low, high = (filled(PAIRS, value) for value in (16, 0xFFFF, 0xFFFF0000))
    lower = builder.or_(builder.and_(first, low), builder.shl(second, sixteen))
    upper = builder.or_(builder.lshr(first, sixteen), builder.and_(second, high))
    return [builder.bitcast(lower, NUMBERS), builder.bitcast(upper, NUMBERS)]


@intrinsic
def add_pairs_of_codes(context, words, offsets, rotations, x, table, num_pairs, sums):
    """Add pairs of codes in any order to `PANEL` sums. For each code `offsets` has where its words begin, int64 bytes
    from `words`, and `rotations` how far they turn, int32; x has its number."""

    def generate(target, builder, signature, arguments):
        words, offsets, rotations, x, table, num_pairs, sums = arguments
        table = load(builder, table, NUMBERS)
        addresses = [builder.add(sums, I64(64 * block)) for block in range(PANEL // LANES)]
        totals = [cgutils.alloca_once_value(builder, load(builder, address, SUMS)) for address in addresses]
        with cgutils.for_range(builder, num_pairs, intp=I64) as loop:
            token = splat(builder, load(builder, advanced(builder, x, loop.index, 4), I32))
            where, turn = advanced(builder, offsets, loop.index, 16), advanced(builder, rotations, loop.index, 8)
            rows = [builder.add(words, load(builder, where, I64, 8 * half)) for half in range(2)]
            turns = [splat(builder, load(builder, turn, I32, 4 * half)) for half in range(2)]
            for block, total in enumerate(totals):
                halves = [load(builder, row, PAIRS, 64 * block) for row in rows]
                codes = _one_of_each(builder, halves, turns)
                numbers = looked_up(builder, table, codes, 0)
                builder.store(add_pairs(builder, builder.load(total), numbers, builder.bitcast(token, NUMBERS)), total)
        for total, address in zip(totals, addresses, strict=True):
            store(builder, builder.load(total), address)
        return target.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


def _one_of_each(builder: ir.IRBuilder, words: Sequence[ir.Value], turns: Sequence[ir.Value]) -> ir.Value:
    """The low halves of the first words beside the high halves of the second, each turned to the right."""
    turned = [
        called(builder, "llvm.fshr.v16i32", PAIRS, [own, own, turn]) for own, turn in zip(words, turns, strict=True)
    ]
    low, high = (builder.and_(own, filled(PAIRS, mask)) for own, mask in zip(turned, (0xFFFF, 0xFFFF0000), strict=True))
    return builder.bitcast(builder.or_(low, high), NUMBERS)
