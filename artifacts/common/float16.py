"""Conversions of float32 and float16; an int16 of numpy holds the bits of a float16. Importing this
module imports numba."""

from llvmlite import ir

from artifacts.common.llvm_vectors import F32, FEATURES, I16, I32, filled, like

HAS_HALVES = "f16c" in FEATURES
"""True if the processor converts float16; if not, integers do."""

# what float32's mantissa has more, and by how much its exponent's bias is larger
_HIDDEN_BITS = 13
_REBIASED = 112
_HALF_EXPONENTS = 2.0**_REBIASED


def float16_bits(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The nearest float16, ties to even, of a float32 or a vector of these: infinity from 65520 on;
    NaN stays NaN."""
    word, half = (like(value, kind) for kind in (I32, I16))
    if HAS_HALVES:
        return builder.bitcast(builder.fptrunc(value, like(value, ir.HalfType())), half)
    bits = builder.bitcast(value, word)
    sign = builder.and_(builder.lshr(bits, filled(word, 16)), filled(word, 0x8000))
    magnitude = builder.and_(bits, filled(word, 0x7FFFFFFF))
    is_odd = builder.and_(builder.lshr(magnitude, filled(word, _HIDDEN_BITS)), filled(word, 1))
    rounding = builder.sub(builder.add(is_odd, filled(word, 0xFFF)), filled(word, _REBIASED << 23))
    found = builder.lshr(builder.add(magnitude, rounding), filled(word, _HIDDEN_BITS))
    # The last bit of 0.5 is that of float16's subnormal numbers: a sum with it has them at its end.
    small = builder.fadd(builder.bitcast(magnitude, value.type), filled(value.type, 0.5))
    small = builder.sub(builder.bitcast(small, word), filled(word, 0x3F000000))
    found = builder.select(
        builder.icmp_unsigned("<", magnitude, filled(word, 0x38800000)), small, found
    )  # below 2**-14
    found = builder.select(
        builder.icmp_unsigned(">=", magnitude, filled(word, 0x477FF000)),
        filled(word, 0x7C00),
        found,
    )
    found = builder.select(
        builder.icmp_unsigned(">", magnitude, filled(word, 0x7F800000)), filled(word, 0x7E00), found
    )
    return builder.trunc(builder.or_(found, sign), half)


def float16_as_float(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    """The float32 of the bits of a float16, or of a vector of these."""
    word, single = (like(halves, kind) for kind in (I32, F32))
    if HAS_HALVES:
        return builder.fpext(builder.bitcast(halves, like(halves, ir.HalfType())), single)
    bits = builder.shl(builder.sext(halves, word), filled(word, _HIDDEN_BITS))
    bits = builder.and_(bits, filled(word, 0x8FFFE000))
    scaled = builder.bitcast(
        builder.fmul(builder.bitcast(bits, single), filled(single, _HALF_EXPONENTS)), word
    )
    is_finite = builder.icmp_unsigned(
        "<", builder.and_(bits, filled(word, 0x0F800000)), filled(word, 0x0F800000)
    )  # the exponent of float16 where that of float32 ends
    return builder.bitcast(
        builder.select(is_finite, scaled, builder.or_(bits, filled(word, 0x7F800000))), single
    )
