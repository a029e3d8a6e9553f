"""Numbers of 16 bits looked up by codes of 4 and 8 bits, in vectors. Importing this module imports numba.

A table lies in the registers of AVX-512. Where the processor has no such vectors, `HAS_LOOKUPS` is false, these
functions do nothing, and callers look numbers up one by one.
"""

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.bfloat16 import bfloat16_bits

HAS_LOOKUPS = all(binding.get_host_cpu_features().get(name) for name in ("avx512bw", "avx512vl"))
BYTES_STEP = 32  # codes of 8 bits that are looked up at a time

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def _vector(element: ir.Type, count: int) -> ir.VectorType:
    return ir.VectorType(element, count)


def _filled(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _at(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, offset: ir.Value) -> ir.Value:
    """A pointer to a vector so many bytes behind the address."""
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def _called(builder: ir.IRBuilder, name: str, operands: list[ir.Value]) -> ir.Value:
    """The result of one of LLVM's functions that give vectors like their first operand."""
    kind = ir.FunctionType(operands[0].type, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)


def _splat(builder: ir.IRBuilder, value: ir.Value, count: int) -> ir.Value:
    kind = _vector(value.type, count)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(one, one, _filled(_vector(_I32, count), 0))


@intrinsic
def look_up_bytes(context, codes, table, out, count):
    """Write `count` numbers, a multiple of `BYTES_STEP`, to the address `out`: those at the 8-bit codes in the table
    [256]."""
    numbers = _vector(_I16, BYTES_STEP)

    def chosen(builder: ir.IRBuilder, index: ir.Value, parts: list[ir.Value], bit: int) -> ir.Value:
        """The numbers in some 32nds of the table; of their halves this bit of the codes chooses."""
        if len(parts) == 2:
            return _called(builder, "llvm.x86.avx512.vpermi2var.hi.512", [parts[0], index, parts[1]])
        low, high = (
            chosen(builder, index, half, bit // 2) for half in (parts[: len(parts) // 2], parts[len(parts) // 2 :])
        )
        is_high = builder.icmp_unsigned("!=", builder.and_(index, _filled(numbers, bit)), _filled(numbers, 0))
        return builder.select(is_high, high, low)

    def generate(target, builder, _, arguments):
        if not HAS_LOOKUPS:
            return target.get_dummy_value()
        codes, table, out, count = arguments
        parts = [builder.load(_at(builder, table, numbers, _I64(64 * part)), align=1) for part in range(8)]
        steps = builder.udiv(count, _I64(BYTES_STEP))
        with cgutils.for_range(builder, steps) as loop:
            first = builder.mul(loop.index, _I64(BYTES_STEP))
            read = builder.load(_at(builder, codes, _vector(_I8, BYTES_STEP), first), align=1)
            found = chosen(builder, builder.zext(read, numbers), parts, 128)
            builder.store(found, _at(builder, out, numbers, builder.mul(first, _I64(2))), align=1)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


def _half_bytes(step: int):
    @intrinsic
    def look_up(context, codes, values, zero, scale, out, count):
        words, numbers, floats = _vector(_I32, step), _vector(_I16, 2 * step), _vector(_F32, 16)
        name = f"llvm.x86.avx512.permvar.hi.{32 * step}"

        def table(builder, values, zero, scale):
            """The bfloat16 of (values - zero) * scale, twice where a vector has 32 lanes."""
            read = builder.load(_at(builder, values, floats, _I64(0)), align=1)
            products = builder.fmul(builder.fsub(read, _splat(builder, zero, 16)), _splat(builder, scale, 16))
            found = bfloat16_bits(builder, products)
            lanes = [lane % 16 for lane in range(2 * step)]
            return builder.shuffle_vector(found, found, ir.Constant(_vector(_I32, 2 * step), lanes))

        def generate(target, builder, _, arguments):
            if not HAS_LOOKUPS:
                return target.get_dummy_value()
            codes, values, zero, scale, out, count = arguments
            numbers_of_codes = table(builder, values, zero, scale)
            with cgutils.for_range(builder, builder.udiv(count, _I64(step))) as loop:
                first = builder.mul(loop.index, _I64(step))
                read = builder.zext(builder.load(_at(builder, codes, _vector(_I8, step), first), align=1), words)
                # The lowest bits of lane 2 i are the low half of byte i, those of lane 2 i + 1 its high half; what is
                # above them counts for nothing.
                index = builder.bitcast(builder.or_(read, builder.shl(read, _filled(words, 12))), numbers)
                found = _called(builder, name, [numbers_of_codes, index])
                builder.store(found, _at(builder, out, numbers, builder.mul(first, _I64(4))), align=1)
            return target.get_dummy_value()

        return types.void(*[types.int64] * 2, *[types.float32] * 2, *[types.int64] * 2), generate

    return look_up


look_up_half_bytes, look_up_few_half_bytes = _half_bytes(16), _half_bytes(8)
"""Write to the address `out` the bfloat16 of (values[code] - zero) * scale for the codes in `count` bytes, the low half
of each first; values float32 [16]. The bytes are a multiple of 16, or of 8."""
