"""Products of codes of 8 bits with one token. They are written in vectors, because LLVM would not
find these in loops.

Codes are converted to float32 and multiplied with x in float32. Operands are int64 addresses.
Importing this module imports numba.
"""

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import F32, I8, I64, advanced, filled, load, splat, vector
from runtime.kernels.cpu.lanes import LANES, PAIRS, SUMS, added_up, plus_product


def _row(products: Callable[..., ir.Value]) -> Callable[..., float]:
    """Return `dot(codes, x, scales, num_scales, steps)`: a row of codes times x, in steps of 32
    bytes of codes.

    `steps` steps have the same scale, float32. `products` makes the sums of a step from the
    addresses of its codes and its x, which takes 128 bytes.
    """

    @intrinsic
    def dot(context, codes, x, scales, num_scales, steps):
        def generate(target, builder, signature, arguments):
            codes, x, scales, num_scales, steps = arguments
            sums = cgutils.alloca_once_value(builder, filled(SUMS, 0.0))
            with cgutils.for_range(builder, num_scales, intp=I64) as outer:
                scale = splat(
                    builder, load(builder, advanced(builder, scales, outer.index, 4), F32)
                )
                with cgutils.for_range(builder, steps, intp=I64) as inner:
                    step = builder.add(builder.mul(outer.index, steps), inner.index)
                    part = products(
                        builder, advanced(builder, codes, step, 32), advanced(builder, x, step, 128)
                    )
                    builder.store(plus_product(builder, builder.load(sums), part, scale), sums)
            return added_up(builder, builder.load(sums))

        return types.float32(*[types.int64] * 5), generate

    return dot


def _bytes(numbers: Callable[[ir.IRBuilder, ir.Value], ir.Value]) -> Callable[..., ir.Value]:
    """Return `products` for 32 numbers of 8 bits with x in float32; `numbers` makes float32 of 16
    bytes."""

    def products(builder: ir.IRBuilder, codes: ir.Value, x: ir.Value) -> ir.Value:
        sums = filled(SUMS, 0.0)
        for half in range(2):
            own = numbers(builder, load(builder, codes, vector(I8, LANES), LANES * half))
            sums = plus_product(builder, sums, own, load(builder, x, SUMS, 4 * LANES * half))
        return sums

    return products


def _floats(exponent_bits: int) -> Callable[[ir.IRBuilder, ir.Value], ir.Value]:
    """Return `numbers` for 8-bit floats, divided by a power of two: their bits go where float32 has
    sign, exponent and mantissa."""
    shift = 16 + exponent_bits
    mask = 0x80000000 | 0x7F << shift

    def numbers(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
        wide = builder.shl(builder.sext(codes, PAIRS), filled(PAIRS, shift))
        return builder.bitcast(builder.and_(wide, filled(PAIRS, mask)), SUMS)

    return numbers


def _signed(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    return builder.sitofp(builder.sext(codes, PAIRS), SUMS)


def _unsigned(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    """Return unsigned integers, less 128, as float32."""
    return _signed(builder, builder.xor(codes, filled(codes.type, 0x80)))


e4m3 = _row(_bytes(_floats(4)))
e5m2 = _row(_bytes(_floats(5)))
int8 = _row(_bytes(_signed))
uint8 = _row(_bytes(_unsigned))
