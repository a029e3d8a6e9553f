"""Blocks of 32 codes of 1, 2, 3 or 4 bits, outputs side by side, times one token, by table look-ups
in vectors.

At 1 and 2 bits, four bits of a word, of four or two codes, choose one of 16 sums of x in float32.
At 3 and 4 bits, codes are looked up as bfloat16 and multiplied by pairs. Importing this module
imports numba.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import (
    FEATURES,
    I32,
    I64,
    advanced,
    called,
    filled,
    load,
    splat,
    store,
)
from artifacts.common.numba_loops import inlined_part as part
from runtime.kernels.cpu.lanes import (
    HAS_PAIRS,
    LANES,
    NUMBERS,
    PAIRS,
    SUMS,
    add_pairs,
    looked_up,
    prefetch,
    switched,
)

_HAS_SUMS = "avx512f" in FEATURES
NUM_FACTORS = 16 * LANES
"""Largest number of factors that a block needs from x."""

# codes of a block; the place that stands for a missing code
_BLOCK = 32
_NOTHING = 32
_SPANNING = ((5, 26), (10, 21))  # codes of 3 bits that are not within half a word

# The codes that are multiplied as a pair: one of the low halves of words and one of the high
# halves.
_PLACES_OF_3 = np.array(
    [(0, 6), (1, 7), (2, 8), (3, 9), (4, _NOTHING), *zip(range(11, 16), range(16, 21), strict=True)]
    + [*zip((22, 23, 24, 25, _NOTHING), range(27, 32), strict=True), *_SPANNING]
)
_PLACES_OF_4 = np.array(
    [(8 * row + code, 8 * row + code + 4) for row in range(4) for code in range(4)]
)

_FIRST = ((0, 2), (1, 0), (2, 1))  # bits before the first code of both halves of each of 3 words
_CODES = (np.arange(16, dtype=np.float32).view(np.uint32) >> 16).tolist()  # as bfloat16


def can_look_up(bits: int, *, is_narrow: bool) -> bool:
    """Return whether the processor can look up codes of this width; `is_narrow` says that x is in
    bfloat16."""
    return _HAS_SUMS if bits <= 2 else bits <= 4 and HAS_PAIRS and is_narrow


@intrinsic
def _add(context, bits, words, stride, factors, num_vectors, sums):
    """Add a block, with rows of words `stride` bytes apart, to sums [O] of `num_vectors` vectors of
    outputs. The factors are tables of sums at 1 and 2 bits, pairs of x at 3 and 4 bits. Operands
    are int64 addresses."""

    def generate(target, builder, signature, arguments):
        bits, *operands = arguments
        cases = {
            width: partial(_write_block, builder, width, *operands)
            for width in range(1, 5)
            if can_look_up(width, is_narrow=True)
        }
        switched(builder, bits, cases)
        return target.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _write_block(
    builder: ir.IRBuilder,
    bits: int,
    words: ir.Value,
    stride: ir.Value,
    factors: ir.Value,
    num_vectors: ir.Value,
    sums: ir.Value,
) -> None:
    """Write the code of `_add` for codes of this width."""
    if bits <= 2:
        own = [load(builder, factors, SUMS, 4 * LANES * number) for number in range(8 * bits)]
    else:
        places = range(len(_PLACES_OF_3 if bits == 3 else _PLACES_OF_4))
        own = [splat(builder, load(builder, factors, I32, 4 * place)) for place in places]
    codes_of = (_codes_of_tables, _codes_of_tables, _codes_of_three, _codes_of_four)[bits - 1]
    table = ir.Constant(NUMBERS, _CODES[: 1 << bits] * (2 * LANES >> bits)) if bits > 2 else None
    with cgutils.for_range(builder, num_vectors, intp=I64) as loop:
        place = advanced(builder, sums, loop.index, 4 * LANES)
        _ask_for_next(builder, words, stride, bits, loop.index)
        totals = [load(builder, place, SUMS), filled(SUMS, 0.0)]
        codes = codes_of(builder, _rows(builder, words, stride, bits, loop.index))
        for turn, (each, factor) in enumerate(zip(codes, own, strict=True)):
            total = totals[turn % 2]
            if table is None:
                name = "llvm.x86.avx512.permvar.sf.512"
                total = builder.fadd(total, called(builder, name, SUMS, [factor, each]))
            else:
                numbers = looked_up(builder, table, each, 0)
                total = add_pairs(builder, total, numbers, builder.bitcast(factor, NUMBERS))
            totals[turn % 2] = total
        store(builder, builder.fadd(*totals), place)


def _rows(
    builder: ir.IRBuilder, words: ir.Value, stride: ir.Value, count: int, index: ir.Value
) -> list[ir.Value]:
    """Return vector number `index` of each of `count` rows of words."""
    starts = [advanced(builder, words, I64(row), stride) for row in range(count)]
    return [load(builder, advanced(builder, start, index, 4 * LANES), PAIRS) for start in starts]


def _ask_for_next(
    builder: ir.IRBuilder, words: ir.Value, stride: ir.Value, count: int, index: ir.Value
) -> None:
    """Prefetch a part of the next block, one cache line after another: the processor does not
    foresee rows that are read side by side."""
    start = advanced(
        builder, advanced(builder, words, I64(count), stride), index, 4 * LANES * count
    )
    for line in range(count):
        prefetch(builder, start, 4 * LANES * line, cache=2)


def _codes_of_tables(builder: ir.IRBuilder, words: Sequence[ir.Value]) -> list[ir.Value]:
    """Return indices of 16 sums, four bits each."""
    return [builder.lshr(packed, filled(PAIRS, 4 * turn)) for packed in words for turn in range(8)]


def _codes_of_four(builder: ir.IRBuilder, words: Sequence[ir.Value]) -> list[ir.Value]:
    return [
        builder.lshr(builder.bitcast(packed, NUMBERS), filled(NUMBERS, 4 * place))
        for packed in words
        for place in range(4)
    ]


def _codes_of_three(builder: ir.IRBuilder, words: Sequence[ir.Value]) -> list[ir.Value]:
    codes = []
    for packed, (low, high) in zip(words, _FIRST, strict=True):
        for place in range(5):
            shifts = ir.Constant(NUMBERS, [low + 3 * place, high + 3 * place] * LANES)
            codes.append(builder.lshr(builder.bitcast(packed, NUMBERS), shifts))
    a, b, c = words

    def right(word: ir.Value, bits: int) -> ir.Value:
        return builder.lshr(word, filled(PAIRS, bits))

    def left(word: ir.Value, bits: int) -> ir.Value:
        return builder.shl(word, filled(PAIRS, bits))

    tenth = builder.or_(right(a, 30), left(b, 2))
    last = builder.or_(left(right(b, 31), 16), left(c, 17))
    return codes + [_halves(builder, right(a, 15), left(c, 2)), _halves(builder, tenth, last)]


def _halves(builder: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """Return the low halves of the first words with the high halves of the second."""
    low = builder.and_(low, filled(PAIRS, 0xFFFF))
    high = builder.and_(high, filled(PAIRS, 0xFFFF0000))
    return builder.bitcast(builder.or_(low, high), NUMBERS)


@part
def _write_sums(x, bits, tables):
    """Write tables of sums [., 16]: number n adds up the x whose codes are the bits of n."""
    for i in range(_BLOCK * bits // 4):
        tables[i, 0] = np.float32(0)
        for bit in range(4):
            own = x[(4 * i + bit) // bits] * np.float32(1 << bit % bits)
            for number in range(1 << bit):
                tables[i, number + (1 << bit)] = tables[i, number] + own


@part
def _write_pairs(x, places, pairs):
    """Write the pairs of x [32] at these places, as bfloat16; nothing for place 32."""
    patterns = x.view(np.uint32)
    for i in range(len(places)):
        for half in range(2):
            place = places[i, half]
            pairs[i, half] = (
                np.uint16(patterns[place] >> np.uint32(16)) if place < _BLOCK else np.uint16(0)
            )


@part
def look_up(words, bits, x, factors, sums):
    """Add the block of 32 codes that begins with these words to sums [O], a whole number of
    vectors. x is [32], and `factors` [`NUM_FACTORS`] is overwritten."""
    if bits <= 2:
        _write_sums(x, bits, factors.reshape(NUM_FACTORS // LANES, LANES))
    else:
        _write_pairs(
            x,
            _PLACES_OF_3 if bits == 3 else _PLACES_OF_4,
            factors.view(np.uint16).reshape(NUM_FACTORS, 2),
        )
    stride = 4 * words.shape[1]
    own = factors.ctypes.data
    _add(bits, words.ctypes.data, stride, own, len(sums) // LANES, sums.ctypes.data)
