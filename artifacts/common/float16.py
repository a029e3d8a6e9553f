"""Conversions of float32 and float16; an int16 of numpy holds the bits of a float16. Importing this
module imports numba."""

from llvmlite import ir

from artifacts.common.llvm_vectors import FEATURES

HAS_HALVES = "f16c" in FEATURES
"""True if the processor converts float16; if not, integers do."""

# what float32's mantissa has more, and by how much its exponent's bias is larger
_HIDDEN_BITS = 13
_REBIASED = 112
_HALF_EXPONENTS = 2.0**_REBIASED


def float16_bits(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The nearest float16, ties to even, of a float32 or a vector of these: infinity from 65520 on;
    NaN stays NaN."""
    word, half = (_like(value, kind) for kind in (ir.IntType(32), ir.IntType(16)))
    if HAS_HALVES:
        return builder.bitcast(builder.fptrunc(value, _like(value, ir.HalfType())), half)
    bits = builder.bitcast(value, word)
    sign = builder.and_(builder.lshr(bits, _all(word, 16)), _all(word, 0x8000))
    magnitude = builder.and_(bits, _all(word, 0x7FFFFFFF))
    is_odd = builder.and_(builder.lshr(magnitude, _all(word, _HIDDEN_BITS)), _all(word, 1))
    rounding = builder.sub(builder.add(is_odd, _all(word, 0xFFF)), _all(word, _REBIASED << 23))
    found = builder.lshr(builder.add(magnitude, rounding), _all(word, _HIDDEN_BITS))
    # The last bit of 0.5 is that of float16's subnormal numbers: a sum with it has them at its end.
    small = builder.fadd(builder.bitcast(magnitude, value.type), _all(value.type, 0.5))
    small = builder.sub(builder.bitcast(small, word), _all(word, 0x3F000000))
    found = builder.select(
        builder.icmp_unsigned("<", magnitude, _all(word, 0x38800000)), small, found
    )  # below 2**-14
    found = builder.select(
        builder.icmp_unsigned(">=", magnitude, _all(word, 0x477FF000)), _all(word, 0x7C00), found
    )
    found = builder.select(
        builder.icmp_unsigned(">", magnitude, _all(word, 0x7F800000)), _all(word, 0x7E00), found
    )
    return builder.trunc(builder.or_(found, sign), half)


def float16_as_float(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    """The float32 of the bits of a float16, or of a vector of these."""
    word, single = (_like(halves, kind) for kind in (ir.IntType(32), ir.FloatType()))
    if HAS_HALVES:
        return builder.fpext(builder.bitcast(halves, _like(halves, ir.HalfType())), single)
    bits = builder.shl(builder.sext(halves, word), _all(word, _HIDDEN_BITS))
    bits = builder.and_(bits, _all(word, 0x8FFFE000))
    scaled = builder.bitcast(
        builder.fmul(builder.bitcast(bits, single), _all(single, _HALF_EXPONENTS)), word
    )
    is_finite = builder.icmp_unsigned(
        "<", builder.and_(bits, _all(word, 0x0F800000)), _all(word, 0x0F800000)
    )  # the exponent of float16 where that of float32 ends
    return builder.bitcast(
        builder.select(is_finite, scaled, builder.or_(bits, _all(word, 0x7F800000))), single
    )


def _like(value: ir.Value, element: ir.Type) -> ir.Type:
    """This type, or a vector of as many as `value` has."""
    return (
        ir.VectorType(element, value.type.count)
        if isinstance(value.type, ir.VectorType)
        else element
    )


def _all(kind: ir.Type, number: float) -> ir.Constant:
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)
