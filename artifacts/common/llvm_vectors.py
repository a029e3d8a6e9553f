"""Vectors in code that LLVM compiles: the features of the processor that it may use, types, and the
basic operations for other modules. Importing this module imports numba."""

from collections.abc import Sequence

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.registry import cpu_target

_NEEDED_BY = {
    "avx": ("avx2", "f16c"),
    "avx2": ("avx512f",),
    "avx512f": ("avx512bw", "avx512vl", "avx512vnni"),
    "avx512bw": ("avx512bf16", "avx512vbmi"),
}


def features_of(written: str) -> frozenset[str]:
    """Return the features that LLVM takes from a list like `+avx2,-avx512f`. The last word on a
    feature counts, and a feature that is taken away takes the features that need it with it."""
    features: set[str] = set()
    for word in filter(None, written.split(",")):
        if word[0] == "+":
            features.add(word[1:])
            continue
        gone = [word[1:]]
        while gone:
            name = gone.pop()
            features.discard(name)
            gone += _NEEDED_BY.get(name, ())
    return frozenset(features)


FEATURES = features_of(cpu_target.target_context.codegen().magic_tuple()[2])
"""Features of the processor that numba compiles for, and that all other modules ask for: those of
this processor, or `NUMBA_CPU_FEATURES`. They are part of the key of numba's cache, so that code
with instructions that a processor lacks is never loaded there."""

I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32 = ir.FloatType()


def vector(element: ir.Type, count: int = 32) -> ir.VectorType:
    return ir.VectorType(element, count)


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, offset: int = 0) -> ir.Value:
    """Load the value that lies `offset` bytes behind the address."""
    return builder.load(
        builder.inttoptr(builder.add(address, I64(offset)), kind.as_pointer()), align=1
    )


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def addresses(
    context: BaseContext, builder: ir.IRBuilder, kinds: Sequence[types.Array], arrays: Sequence
) -> list[ir.Value]:
    """Return the addresses of the first elements of numba's arrays of these kinds."""
    made = zip(kinds, arrays, strict=True)
    data = (context.make_array(kind)(context, builder, array).data for kind, array in made)
    return [builder.ptrtoint(each, I64) for each in data]


def advanced(
    builder: ir.IRBuilder, address: ir.Value, index: ir.Value, nbytes: int | ir.Value
) -> ir.Value:
    """Return the address `index` times `nbytes` bytes further on."""
    return builder.add(
        address, builder.mul(index, I64(nbytes) if isinstance(nbytes, int) else nbytes)
    )


def like(value: ir.Value, element: ir.Type) -> ir.Type:
    """This type, or a vector of as many as `value` has."""
    return vector(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def filled(kind: ir.Type, number: float) -> ir.Constant:
    """The number as this type, or a vector of copies."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def spread(builder: ir.IRBuilder, values: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """A vector of the values with these indices."""
    return builder.shuffle_vector(values, values, ir.Constant(vector(I32, len(lanes)), list(lanes)))


def splat(builder: ir.IRBuilder, value: ir.Value, count: int = 16) -> ir.Value:
    """A vector of copies of the value."""
    one = builder.insert_element(
        ir.Constant(vector(value.type, count), ir.Undefined), value, I32(0)
    )
    return spread(builder, one, [0] * count)


def called(
    builder: ir.IRBuilder, name: str, result: ir.Type, operands: Sequence[ir.Value]
) -> ir.Value:
    """The result of a function that LLVM knows by this name."""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, name),
        operands,
        fastmath=("reassoc",) if "reduce.f" in name else (),
    )


def chosen_of_16(builder: ir.IRBuilder, codes: ir.Value, numbers: Sequence[int]) -> ir.Value:
    """The number of each code below 16, of the type of the codes: 32 bytes by the processor's own
    look-up if it has AVX2, others by a tree of choices."""
    if "avx2" in FEATURES and codes.type == vector(I8):
        table = ir.Constant(codes.type, [*numbers, *numbers])
        return called(builder, "llvm.x86.avx2.pshuf.b", codes.type, [table, codes])
    choices = [filled(codes.type, number) for number in numbers]
    for bit in range(4):
        is_set = builder.icmp_unsigned(
            "!=", builder.and_(codes, filled(codes.type, 1 << bit)), filled(codes.type, 0)
        )
        choices = [
            builder.select(is_set, odd, even)
            for even, odd in zip(choices[::2], choices[1::2], strict=True)
        ]
    return choices[0]


def chosen_of_64(builder: ir.IRBuilder, table: Sequence[ir.Value], indices: ir.Value) -> ir.Value:
    """The words of two vectors of 32 words at 32 indices below 64, for a processor with
    AVX512-BW."""
    name = "llvm.x86.avx512.vpermi2var.hi.512"
    return called(builder, name, indices.type, [table[0], indices, table[1]])
