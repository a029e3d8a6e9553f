"""Numbers of 16 bits looked up by codes of 4 and 8 bits, in vectors. Importing this module imports
numba.

A table lies in the registers of AVX-512. Where the processor has no such vectors, `HAS_LOOKUPS` is
false, these functions do nothing, and callers look numbers up one by one.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.bfloat16 import bfloat16_bits
from artifacts.common.llvm_vectors import (
    F32,
    FEATURES,
    I8,
    I16,
    I32,
    I64,
    advanced,
    called,
    chosen_of_64,
    filled,
    load,
    splat,
    spread,
    store,
    vector,
)

HAS_LOOKUPS = all(name in FEATURES for name in ("avx512bw", "avx512vl"))
BYTES_STEP = 32  # codes of 8 bits that are looked up at a time


@intrinsic
def look_up_bytes(context, codes, table, out, count):
    """Write `count` numbers, a multiple of `BYTES_STEP`, to the address `out`: those at the 8-bit
    codes in the table [256]."""
    numbers = vector(I16, BYTES_STEP)

    def chosen(builder: ir.IRBuilder, index: ir.Value, parts: list[ir.Value], bit: int) -> ir.Value:
        """The numbers in some 32nds of the table; of their halves this bit of the codes chooses."""
        if len(parts) == 2:
            return chosen_of_64(builder, parts, index)
        low, high = (
            chosen(builder, index, half, bit // 2)
            for half in (parts[: len(parts) // 2], parts[len(parts) // 2 :])
        )
        is_high = builder.icmp_unsigned(
            "!=", builder.and_(index, filled(numbers, bit)), filled(numbers, 0)
        )
        return builder.select(is_high, high, low)

    def generate(target, builder, _, arguments):
        if not HAS_LOOKUPS:
            return target.get_dummy_value()
        codes, table, out, count = arguments
        parts = [load(builder, table, numbers, 64 * part) for part in range(8)]
        with cgutils.for_range(builder, builder.udiv(count, I64(BYTES_STEP))) as loop:
            read = load(
                builder, advanced(builder, codes, loop.index, BYTES_STEP), vector(I8, BYTES_STEP)
            )
            found = chosen(builder, builder.zext(read, numbers), parts, 128)
            store(builder, found, advanced(builder, out, loop.index, 2 * BYTES_STEP))
        return target.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


def _half_bytes(step: int):
    @intrinsic
    def look_up(context, codes, values, zero, scale, out, count):
        words = vector(I32, step)
        numbers = vector(I16, 2 * step)
        name = f"llvm.x86.avx512.permvar.hi.{32 * step}"

        def table(builder, values, zero, scale):
            """The bfloat16 of (values - zero) * scale, twice where a vector has 32 lanes."""
            differences = builder.fsub(load(builder, values, vector(F32, 16)), splat(builder, zero))
            found = bfloat16_bits(builder, builder.fmul(differences, splat(builder, scale)))
            return spread(builder, found, [lane % 16 for lane in range(2 * step)])

        def generate(target, builder, _, arguments):
            if not HAS_LOOKUPS:
                return target.get_dummy_value()
            codes, values, zero, scale, out, count = arguments
            numbers_of_codes = table(builder, values, zero, scale)
            with cgutils.for_range(builder, builder.udiv(count, I64(step))) as loop:
                read = load(builder, advanced(builder, codes, loop.index, step), vector(I8, step))
                read = builder.zext(read, words)
                # The lowest bits of lane 2 i are the low half of byte i, those of lane 2 i + 1 its
                # high half; what is above them counts for nothing.
                index = builder.bitcast(
                    builder.or_(read, builder.shl(read, filled(words, 12))), numbers
                )
                found = called(builder, name, numbers, [numbers_of_codes, index])
                store(builder, found, advanced(builder, out, loop.index, 4 * step))
            return target.get_dummy_value()

        return types.void(*[types.int64] * 2, *[types.float32] * 2, *[types.int64] * 2), generate

    return look_up


# Write to the address `out` the bfloat16 of (values[code] - zero) * scale for the codes in `count`
# bytes, the low half of each first; values float32 [16]. The bytes are a multiple of 16, or of 8.
look_up_half_bytes = _half_bytes(16)
look_up_few_half_bytes = _half_bytes(8)
