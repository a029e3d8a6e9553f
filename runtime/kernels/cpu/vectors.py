"""Products of codes of 4 and 8 bits with one token, written in vectors, which LLVM would not find in loops.

Codes of 4 bits are multiplied with bfloat16: one instruction looks up the numbers of 32 codes in a table, and another
adds up the products of pairs. Operands are int64 addresses. Importing this module imports numba.
"""

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from runtime.kernels.cpu.lanes import (
    F32,
    I8,
    I64,
    LANES,
    NUMBERS,
    PAIRS,
    SUMS,
    add_pairs,
    added_up,
    advanced,
    filled,
    load,
    looked_up,
    plus_product,
    spread,
    vector,
)


def _row(products: Callable[..., ir.Value], scales_per_step: int = 1) -> Callable[..., float]:
    """Return `dot(codes, x, scales, table, num_scales, steps)`: a row of codes times x, in steps of 32 bytes of codes.

    A step has this many scales, float32, or, where it is one, `steps` steps have the same. `products` makes the sums of
    a step from the table and the addresses of its codes and its x, which takes 128 bytes.
    """
    lanes = [lane * scales_per_step // LANES for lane in range(LANES)]

    @intrinsic
    def dot(context, codes, x, scales, table, num_scales, steps):
        def generate(target, builder, signature, arguments):
            codes, x, scales, table, num_scales, steps = arguments
            table, sums = load(builder, table, NUMBERS), cgutils.alloca_once_value(builder, filled(SUMS, 0.0))
            count = builder.sdiv(num_scales, I64(scales_per_step))
            with cgutils.for_range(builder, count, intp=I64) as outer:
                address = advanced(builder, scales, outer.index, 4 * scales_per_step)
                scale = spread(builder, load(builder, address, vector(F32, scales_per_step)), lanes)
                with cgutils.for_range(builder, steps, intp=I64) as inner:
                    step = builder.add(builder.mul(outer.index, steps), inner.index)
                    part = products(builder, table, advanced(builder, codes, step, 32), advanced(builder, x, step, 128))
                    builder.store(plus_product(builder, builder.load(sums), part, scale), sums)
            return added_up(builder, builder.load(sums))

        return types.float32(*[types.int64] * 6), generate

    return dot


def _half_bytes(builder: ir.IRBuilder, table: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
    """64 codes of 4 bits with x in bfloat16, for the low halves of bytes first."""
    codes, sums = builder.zext(load(builder, codes, vector(I8)), NUMBERS), filled(SUMS, 0.0)
    for half in range(2):
        numbers = looked_up(builder, table, codes, 4 * half)
        sums = add_pairs(builder, sums, numbers, load(builder, x, NUMBERS, 64 * half))
    return sums


def _bytes(numbers: Callable[[ir.IRBuilder, ir.Value], ir.Value]) -> Callable[..., ir.Value]:
    """32 numbers of 8 bits with x in float32; `numbers` makes float32 of 16 bytes."""

    def products(builder: ir.IRBuilder, table: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
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


half_bytes_by_fours, half_bytes_by_twos, half_bytes = (_row(_half_bytes, number) for number in (4, 2, 1))
e4m3, e5m2 = _row(_bytes(_floats(4))), _row(_bytes(_floats(5)))
int8, uint8 = _row(_bytes(_signed)), _row(_bytes(_unsigned))
