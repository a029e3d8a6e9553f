"""Rounding of float32 to bfloat16; a uint16 of numpy holds the bits of a bfloat16. Importing this
module imports numba."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import I16, I32, filled, like


def bfloat16_bits(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The nearest bfloat16, ties to even, of a float32 or of a vector of these; NaN of arithmetic
    stays NaN."""
    word = like(value, I32)
    bits = builder.bitcast(value, word)
    is_odd = builder.and_(builder.lshr(bits, filled(word, 16)), filled(word, 1))
    rounded = builder.add(bits, builder.add(is_odd, filled(word, 0x7FFF)))
    return builder.trunc(builder.lshr(rounded, filled(word, 16)), like(value, I16))


@intrinsic
def stored_as(context, value, like):
    """Convert a float32 to an element of the array `like`: as it is, or rounded to a bfloat16 for
    uint16."""
    element = like.dtype

    def generate(_, builder, __, arguments):
        return arguments[0] if element == types.float32 else bfloat16_bits(builder, arguments[0])

    return element(types.float32, like), generate
