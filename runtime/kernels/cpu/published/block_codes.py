"""LLVM code that loads the scales and codes of ggml's blocks as vectors. Importing this module
imports numba."""

from llvmlite import ir

from artifacts.common.float16 import float16_as_float
from artifacts.common.llvm_vectors import (
    F32,
    I8,
    I16,
    I32,
    chosen_of_16,
    filled,
    load,
    spread,
    vector,
)
from artifacts.formats.codes import E2M1_DOUBLED, IQ4
from runtime.kernels.cpu.lanes import HAS_WORD_TABLES, LANES, NUMBERS, PAIRS, SUMS, chosen

STEP = 8 * LANES  # weights whose codes of 4 bits are 64 bytes


def halves(builder: ir.IRBuilder, block: ir.Value, nbytes: int, count: int) -> ir.Value:
    """Return the scales of `count` blocks of `nbytes`, float16 at their beginning: float32
    [count]."""
    return float16_as_float(builder, _first_of_each(builder, block, I16, nbytes, count))


def exponents(builder: ir.IRBuilder, block: ir.Value, nbytes: int, count: int) -> ir.Value:
    """Return the same for MXFP4, whose scales are powers of two given by their exponent. Exponent 0
    gives a subnormal number."""
    wide = vector(I32, count)
    codes = builder.zext(_first_of_each(builder, block, I8, nbytes, count), wide)
    bits = builder.select(
        builder.icmp_unsigned("==", codes, filled(wide, 0)),
        filled(wide, 1 << 22),
        builder.shl(codes, filled(wide, 23)),
    )
    return builder.bitcast(bits, vector(F32, count))


def _first_of_each(
    builder: ir.IRBuilder, block: ir.Value, kind: ir.Type, nbytes: int, count: int
) -> ir.Value:
    if kind == I16 and count == 4 and HAS_WORD_TABLES:
        last = 2 * ((3 * nbytes - 62) // 2) if 3 * nbytes >= 64 else 0
        words = [load(builder, block, NUMBERS, start) for start in (0, last)]
        places = [i * nbytes // 2 for i in range(count)]
        places = [own if own < 32 else 32 + own - last // 2 for own in places]
        return chosen(builder, *words, places)
    out = ir.Constant(vector(kind, count), ir.Undefined)
    for i in range(count):
        out = builder.insert_element(out, load(builder, block, kind, i * nbytes), I32(i))
    return out


def scales_k(builder: ir.IRBuilder, block: ir.Value) -> ir.Value:
    """Return the scales and minima of Q4_K and Q5_K, float32 [16]: four scales, four minima, and so
    on."""
    lower = load(builder, block, vector(I8, 8), 4)
    upper = load(builder, block, vector(I8, 4), 12)
    last = joined(builder, [_bits(builder, upper, 0xF), _bits(builder, upper, 0xF, 4)])
    last = builder.or_(last, _bits(builder, lower, 0x30, 2))
    codes = joined(builder, [_bits(builder, lower, 0x3F), last])
    factors = spread(
        builder,
        float16_as_float(builder, load(builder, block, vector(I16, 2))),
        ([0] * 4 + [1] * 4) * 2,
    )
    return builder.fmul(builder.sitofp(builder.zext(codes, PAIRS), SUMS), factors)


def scales_6(builder: ir.IRBuilder, block: ir.Value) -> ir.Value:
    """Return the scales of Q6_K, float32 [16]."""
    codes = builder.sitofp(builder.sext(load(builder, block, vector(I8, LANES), 192), PAIRS), SUMS)
    return builder.fmul(
        codes,
        spread(
            builder,
            float16_as_float(builder, load(builder, block, vector(I16, 1), 208)),
            [0] * LANES,
        ),
    )


def scales_2(builder: ir.IRBuilder, block: ir.Value) -> ir.Value:
    """Return the scales of Q2_K, then its minima: float32 [32]."""
    packed = load(builder, block, vector(I8, LANES))
    codes = joined(builder, [_bits(builder, packed, 0xF), _bits(builder, packed, 0xF, 4)])
    factors = spread(
        builder,
        float16_as_float(builder, load(builder, block, vector(I16, 2), 80)),
        [0] * LANES + [1] * LANES,
    )
    return builder.fmul(builder.sitofp(builder.zext(codes, vector(I32)), vector(F32)), factors)


def scales_3(builder: ir.IRBuilder, block: ir.Value) -> ir.Value:
    """Return the scales of Q3_K, float32 [16]."""
    lower = load(builder, block, vector(I8, 8), 96)
    upper = load(builder, block, vector(I8, 4), 104)
    low = joined(builder, [_bits(builder, lower, 0xF), _bits(builder, lower, 0xF, 4)])
    quarters = [_bits(builder, upper, 0x30, shift) for shift in (-4, -2, 0, 2)]
    high = joined(builder, [joined(builder, quarters[:2]), joined(builder, quarters[2:])])
    return _less_32(builder, builder.zext(builder.or_(low, high), PAIRS), block, 108)


def scales_iq4(builder: ir.IRBuilder, block: ir.Value) -> ir.Value:
    """Return the scales of IQ4_XS, float32 [8]."""
    wide = vector(I32, 8)
    packed = load(builder, block, vector(I8, 4), 4)
    low = joined(builder, [_bits(builder, packed, 0xF), _bits(builder, packed, 0xF, 4)])
    low = builder.zext(spread(builder, low, [0, 4, 1, 5, 2, 6, 3, 7]), wide)
    upper = spread(builder, load(builder, block, vector(I16, 1), 2), [0] * 8)
    high = builder.lshr(builder.zext(upper, wide), ir.Constant(wide, [*range(0, 16, 2)]))
    return _less_32(
        builder,
        builder.or_(low, _bits(builder, builder.shl(high, filled(wide, 4)), 0x30)),
        block,
        0,
    )


def _less_32(builder: ir.IRBuilder, codes: ir.Value, block: ir.Value, start: int) -> ir.Value:
    """Return the scale at byte `start` of a block times the scales of its groups, which are 32 less
    than their codes."""
    count = codes.type.count
    whole = spread(
        builder, float16_as_float(builder, load(builder, block, vector(I16, 1), start)), [0] * count
    )
    return builder.fmul(
        builder.sitofp(builder.sub(codes, filled(codes.type, 32)), vector(F32, count)), whole
    )


# Codes of a block in the order of the weights, in vectors of 32 bytes


def codes_8(builder: ir.IRBuilder, block: ir.Value) -> list[ir.Value]:
    return [load(builder, block, vector(I8), 2)]


def codes_4(builder: ir.IRBuilder, block: ir.Value, start: int) -> list[ir.Value]:
    """Return the codes in 16 bytes behind a scale of `start` bytes: the low halves, then the high
    ones."""
    twice = spread(builder, load(builder, block, vector(I32, 4), start), [*range(4)] * 2)
    codes = builder.lshr(twice, ir.Constant(twice.type, [0] * 4 + [4] * 4))
    return [_bits(builder, builder.bitcast(codes, vector(I8)), 0xF)]


def codes_iq4(builder: ir.IRBuilder, block: ir.Value, start: int = 2) -> list[ir.Value]:
    """Return the numbers that the codes of IQ4_NL stand for."""
    return [chosen_of_16(builder, codes, IQ4) for codes in codes_4(builder, block, start)]


def codes_4_signed(builder: ir.IRBuilder, block: ir.Value) -> list[ir.Value]:
    """Return the codes of Q4_0, less 8."""
    (codes,) = codes_4(builder, block, 2)
    return [builder.sub(codes, filled(codes.type, 8))]


def codes_5_signed(builder: ir.IRBuilder, block: ir.Value) -> list[ir.Value]:
    """Return the codes of Q5_0, less 16: a word has the fifth bits of 32 weights."""
    (lower,) = codes_4(builder, block, 6)
    fifths = spread(builder, load(builder, block, vector(I8, 4), 2), [i // 8 for i in range(32)])
    own = ir.Constant(fifths.type, [1 << i % 8 for i in range(32)])
    is_clear = builder.icmp_unsigned("==", builder.and_(fifths, own), filled(own.type, 0))
    return [
        builder.or_(lower, builder.and_(builder.sext(is_clear, lower.type), filled(own.type, -16)))
    ]


def codes_e2m1(builder: ir.IRBuilder, block: ir.Value) -> list[ir.Value]:
    """Return twice the floats of MXFP4."""
    return [chosen_of_16(builder, codes, E2M1_DOUBLED) for codes in codes_4(builder, block, 1)]


def half_exponents(builder: ir.IRBuilder, block: ir.Value, nbytes: int, count: int) -> ir.Value:
    """Return the scales of MXFP4 for them."""
    scales = exponents(builder, block, nbytes, count)
    return builder.fmul(scales, filled(scales.type, 0.5))


def codes_iq4_groups(builder: ir.IRBuilder, block: ir.Value) -> list[ir.Value]:
    """Return the same for IQ4_XS, plus 128."""
    groups = [codes for group in range(8) for codes in codes_iq4(builder, block, 8 + 16 * group)]
    return [builder.xor(codes, filled(codes.type, 0x80)) for codes in groups]


def codes_2k(builder: ir.IRBuilder, block: ir.Value, start: int = 16) -> list[ir.Value]:
    packed = [load(builder, block, vector(I8), start + 32 * half) for half in range(2)]
    return [_bits(builder, own, 3, shift) for own in packed for shift in (0, 2, 4, 6)]


def codes_3k(builder: ir.IRBuilder, block: ir.Value) -> list[ir.Value]:
    third = load(builder, block, vector(I8))
    lower = codes_2k(builder, block, 32)
    return [builder.or_(low, _bits(builder, third, 4, bit - 2)) for bit, low in enumerate(lower)]


def codes_4k(builder: ir.IRBuilder, block: ir.Value, start: int = 16) -> list[ir.Value]:
    packed = [load(builder, block, vector(I8), start + 32 * run) for run in range(4)]
    return [_bits(builder, own, 0xF, shift) for own in packed for shift in (0, 4)]


def codes_5k(builder: ir.IRBuilder, block: ir.Value) -> list[ir.Value]:
    fifth = load(builder, block, vector(I8), 16)
    lower = codes_4k(builder, block, 48)
    return [
        builder.or_(low, _bits(builder, fifth, 0x10, group - 4)) for group, low in enumerate(lower)
    ]


def codes_6k(builder: ir.IRBuilder, block: ir.Value) -> list[ir.Value]:
    codes = []
    for half in range(2):
        upper = load(builder, block, vector(I8), 128 + 32 * half)
        packed = [load(builder, block, vector(I8), 64 * half + 32 * run) for run in range(2)]
        lower = [_bits(builder, own, 0xF, shift) for shift in (0, 4) for own in packed]
        codes += [
            builder.or_(low, _bits(builder, upper, 0x30, 2 * run - 4))
            for run, low in enumerate(lower)
        ]
    return codes


# Codes of 128 weights: 64 bytes as words of four codes each. Vector i has code i of every word.


def of_blocks(builder: ir.IRBuilder, block: ir.Value, start: int, nbytes: int) -> ir.Value:
    """Return the words of four blocks of `nbytes` that begin with a scale of `start` bytes."""
    blocks = [load(builder, block, vector(I16, 8), start + nbytes * i) for i in range(4)]
    return joined(builder, [joined(builder, blocks[:2]), joined(builder, blocks[2:])])


def words_2k(builder: ir.IRBuilder, block: ir.Value, start: int = 16) -> list[ir.Value]:
    """Return all codes of Q2_K: words of both halves of a block, which begin at the same bit."""
    words = load(builder, block, NUMBERS, start)
    return [_bits(builder, words, 3, shift + odd) for shift in (0, 2, 4, 6) for odd in (0, 8)]


def words_3k(builder: ir.IRBuilder, block: ir.Value) -> list[ir.Value]:
    third = _upper(builder, block, 0, (0, 4))
    lower = words_2k(builder, block, 32)
    shifts = [bit + odd - 2 for bit in range(4) for odd in (0, 8)]
    return [
        builder.or_(low, _bits(builder, third, 4, shift))
        for low, shift in zip(lower, shifts, strict=True)
    ]


def words_iq4(builder: ir.IRBuilder, block: ir.Value, half: int) -> ir.Value:
    """Return the words of four groups of IQ4_XS, in the order of `of_blocks`."""
    return load(builder, block, NUMBERS, 8 + 64 * half)


def words_4k(builder: ir.IRBuilder, block: ir.Value, half: int, start: int = 16) -> list[ir.Value]:
    words = load(builder, block, NUMBERS, start + 64 * half)
    return [_bits(builder, words, 0xF, 4 * i) for i in range(4)]


def words_5k(builder: ir.IRBuilder, block: ir.Value, half: int) -> list[ir.Value]:
    fifth = _upper(builder, block, 16, (4 * half, 4 * half + 2))
    lower = words_4k(builder, block, half, 48)
    shifts = (-4, -3, 4, 5)
    return [
        builder.or_(low, _bits(builder, fifth, 0x10, shift))
        for low, shift in zip(lower, shifts, strict=True)
    ]


def words_6k(builder: ir.IRBuilder, block: ir.Value, half: int) -> list[ir.Value]:
    upper = _upper(builder, block, 128 + 32 * half, (0, 2))
    lower = words_4k(builder, block, half, 0)
    shifts = (-4, 0, 4, 8)
    return [
        builder.or_(low, _bits(builder, upper, 0x30, shift))
        for low, shift in zip(lower, shifts, strict=True)
    ]


def _upper(builder: ir.IRBuilder, block: ir.Value, start: int, shifts: tuple[int, int]) -> ir.Value:
    """Return 32 bytes twice as words, each copy shifted down so that both have the bits that belong
    to the lower bits at the same place."""
    words = load(builder, block, vector(I16, LANES), start)
    amounts = [shift for shift in shifts for _ in range(LANES)]
    return builder.lshr(joined(builder, [words, words]), ir.Constant(NUMBERS, amounts))


def _bits(builder: ir.IRBuilder, codes: ir.Value, mask: int, shift: int = 0) -> ir.Value:
    """Return the bits of `mask` after the codes are shifted down by `shift`, or up if it is
    negative."""
    if shift:
        move = builder.lshr if shift > 0 else builder.shl
        codes = move(codes, filled(codes.type, abs(shift)))
    return builder.and_(codes, filled(codes.type, mask))


def joined(builder: ir.IRBuilder, halves: list[ir.Value]) -> ir.Value:
    """Return two vectors, one behind the other."""
    count = 2 * halves[0].type.count
    return builder.shuffle_vector(*halves, ir.Constant(vector(I32, count), [*range(count)]))
