"""Products of codes of 8 bits with one token. They are written in vectors, because LLVM would not
find these in loops.

Codes are converted to float32 and multiplied with x in float32. Operands are int64 addresses.
Importing this module imports numba.
"""

from collections.abc import Callable
from functools import partial

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import F32, I8, I64, advanced, filled, load, splat, vector
from runtime.kernels.cpu.lanes import LANES, PAIRS, SUMS, added_up, plus_product, switched
from runtime.kernels.cpu.published.published import E4M3, E5M2, INT8, UINT8


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


_PRODUCTS = {
    E4M3: _bytes(_floats(4)),
    E5M2: _bytes(_floats(5)),
    INT8: _bytes(_signed),
    UINT8: _bytes(_unsigned),
}


@intrinsic
def dot_bytes(context, kind, codes, x, scales, num_scales, steps):
    """Return a row of codes of this kind times x, in steps of 32 bytes of codes and 128 of x. Each
    `steps` steps have the same scale, float32."""

    def generate(target, builder, signature, arguments):
        kind, codes, x, scales, num_scales, steps = arguments
        sums = cgutils.alloca_once_value(builder, filled(SUMS, 0.0))

        def write(products: Callable[..., ir.Value]) -> None:
            with cgutils.for_range(builder, num_scales, intp=I64) as outer:
                scale = load(builder, advanced(builder, scales, outer.index, 4), F32)
                scale = splat(builder, scale)
                with cgutils.for_range(builder, steps, intp=I64) as inner:
                    step = builder.add(builder.mul(outer.index, steps), inner.index)
                    places = advanced(builder, codes, step, 32), advanced(builder, x, step, 128)
                    part = products(builder, *places)
                    builder.store(plus_product(builder, builder.load(sums), part, scale), sums)

        switched(builder, kind, {number: partial(write, own) for number, own in _PRODUCTS.items()})
        return added_up(builder, builder.load(sums))

    return types.float32(*[types.int64] * 6), generate
