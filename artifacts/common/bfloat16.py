"""Rounding of float32 to bfloat16; a uint16 of numpy holds the bits of a bfloat16. Importing this
module imports numba."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def bfloat16_bits(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The nearest bfloat16, ties to even, of a float32 or of a vector of these; NaN of arithmetic
    stays NaN."""
    count = value.type.count if isinstance(value.type, ir.VectorType) else 0
    word, half = (
        ir.VectorType(kind, count) if count else kind for kind in (ir.IntType(32), ir.IntType(16))
    )

    def constant(number: int) -> ir.Constant:
        return ir.Constant(word, [number] * count if count else number)

    bits = builder.bitcast(value, word)
    is_odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.add(bits, builder.add(is_odd, constant(0x7FFF)))
    return builder.trunc(builder.lshr(rounded, constant(16)), half)


@intrinsic
def stored_as(context, value, like):
    """Convert a float32 to an element of the array `like`: as it is, or rounded to a bfloat16 for
    uint16."""
    element = like.dtype

    def generate(_, builder, __, arguments):
        return arguments[0] if element == types.float32 else bfloat16_bits(builder, arguments[0])

    return element(types.float32, like), generate
