"""Sixteen codes of ggml's blocks made numbers at a time, on any processor. Importing this module
imports numba."""

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core.base import BaseContext
from numba.extending import intrinsic

from artifacts.common.bfloat16 import bfloat16_bits
from artifacts.common.llvm_vectors import (
    F32,
    I8,
    I16,
    I32,
    I64,
    addresses,
    advanced,
    chosen_of_16,
    filled,
    load,
    splat,
    store,
    vector,
)
from artifacts.formats.codes import IQ4

COUNT = 16  # numbers that are written at a time
_BYTES, _WORDS, _FLOATS = (vector(kind, COUNT) for kind in (I8, I32, F32))


def _spread(builder: ir.IRBuilder, value: ir.Value, kind: ir.VectorType) -> ir.Value:
    """A vector of copies of a number, which is cut to size if it is whole."""
    element = builder.trunc(value, kind.element) if isinstance(kind.element, ir.IntType) else value
    return splat(builder, element, COUNT)


def _bits(builder: ir.IRBuilder, address: ir.Value, shift: ir.Value, mask: ir.Value) -> ir.Value:
    """Some bits of each of 16 bytes, as words."""
    read = load(builder, address, _BYTES)
    wanted = builder.and_(
        builder.lshr(read, _spread(builder, shift, _BYTES)), _spread(builder, mask, _BYTES)
    )
    return builder.zext(wanted, _WORDS)


def _bits_of_word(
    builder: ir.IRBuilder, address: ir.Value, shift: ir.Value, mask: ir.Value
) -> ir.Value:
    """Some bits behind each place of a number of 16 bits, as words."""
    kind = vector(I16, COUNT)
    read = splat(builder, load(builder, address, I16), COUNT)
    own = builder.lshr(read, ir.Constant(kind, list(range(COUNT))))
    wanted = builder.lshr(own, _spread(builder, shift, kind))
    return builder.zext(builder.and_(wanted, _spread(builder, mask, kind)), _WORDS)


def _write(
    context: BaseContext,
    builder: ir.IRBuilder,
    numbers: ir.Value,
    kind: types.Array,
    row: ir.Value,
    place: ir.Value,
) -> None:
    """Store numbers in an array of this kind, behind `place` times as many others."""
    stored = numbers if kind.dtype == types.float32 else bfloat16_bits(builder, numbers)
    [start] = addresses(context, builder, [kind], [row])
    nbytes = numbers.type.count * kind.dtype.bitwidth // 8
    store(builder, stored, advanced(builder, start, place, nbytes))


def _whole(_: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    return codes


def _doubled_e2m1(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    """Twice the 4-bit floats of the codes: whole numbers."""
    one = filled(_WORDS, 1)
    exponent = builder.and_(builder.lshr(codes, one), filled(_WORDS, 3))
    is_normal = builder.zext(builder.icmp_unsigned("!=", exponent, filled(_WORDS, 0)), _WORDS)
    digits = builder.or_(builder.and_(codes, one), builder.shl(is_normal, one))
    size = builder.shl(digits, builder.sub(exponent, is_normal))
    is_negative = builder.icmp_unsigned(
        "!=", builder.and_(codes, filled(_WORDS, 8)), filled(_WORDS, 0)
    )
    return builder.select(is_negative, builder.neg(size), size)


def _of_iq4(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    return chosen_of_16(builder, codes, IQ4)


def _writer(
    integers: Callable[[ir.IRBuilder, ir.Value], ir.Value],
    num_lower: int = 4,
    upper_of: Callable = _bits,
):
    @intrinsic
    def write(
        context, lows, low_shift, highs, high_shift, high_mask, less, scale, minimum, out, place
    ):
        def generate(target, builder, _, arguments):
            lows, low_shift, highs, high_shift, high_mask, less, scale, minimum, *to = arguments
            upper = upper_of(builder, highs, high_shift, high_mask)
            lower = _bits(builder, lows, low_shift, I64((1 << num_lower) - 1))
            codes = builder.or_(lower, builder.shl(upper, filled(_WORDS, num_lower)))
            wanted = builder.sub(integers(builder, codes), _spread(builder, less, _WORDS))
            products = builder.fmul(
                builder.sitofp(wanted, _FLOATS), _spread(builder, scale, _FLOATS)
            )
            numbers = builder.fsub(products, _spread(builder, minimum, _FLOATS))
            _write(target, builder, numbers, out, *to)
            return target.get_dummy_value()

        addresses_and_bits = [types.int64] * 6
        factors = [types.float32] * 2
        return types.void(*addresses_and_bits, *factors, out, types.int64), generate

    return write


@intrinsic
def write_points(context, one, other, signs, scale, out, place):
    """Write 8 numbers into the array `out`, as `write_integers` does 16: four signed bytes at `one`
    and four at `other` times the eight at `signs`, times `scale`, rounded to float32."""

    def generate(target, builder, _, arguments):
        one, other, signs, scale, *to = arguments
        points = builder.shuffle_vector(
            *(load(builder, each, vector(I8, 4)) for each in (one, other)),
            ir.Constant(vector(I32, 8), list(range(8))),
        )
        codes = builder.mul(points, load(builder, signs, vector(I8, 8)))
        numbers = builder.sitofp(builder.sext(codes, vector(I32, 8)), vector(F32, 8))
        _write(target, builder, builder.fmul(numbers, splat(builder, scale, 8)), out, *to)
        return target.get_dummy_value()

    addresses = [types.int64] * 3
    return types.void(*addresses, types.float32, out, types.int64), generate


write_integers = _writer(_whole)
write_floats = _writer(_doubled_e2m1)
write_from_table = _writer(_of_iq4)
write_upon_two_bits = _writer(_whole, 2)
write_upon_word = _writer(_whole, upper_of=_bits_of_word)
"""Write 16 numbers into the array `out`, float32, or uint16 for bfloat16, behind 16 * `place`
others: `code * scale - minimum`, every step rounded to float32.

The low bits of a code, four or two, come from a byte at the address `lows` behind `low_shift` bits,
its upper bits from the bits of `high_mask` at `highs`, or, upon a word, from each place of one word
there. Codes are whole numbers, `less` too large, or 4-bit floats (e2m1), which count twice, or
places in the table of IQ4_NL.
"""
