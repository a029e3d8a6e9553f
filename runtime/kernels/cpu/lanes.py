"""Vector operations in LLVM's code, from which the vector kernels make their products. A vector is
of 16 sums, float32, or of 32 numbers, bfloat16 as uint16, or of 32 codes. Importing this module
imports numba.
"""

from collections.abc import Callable, Mapping, Sequence

from llvmlite import ir

from artifacts.common.llvm_vectors import F32, FEATURES, I8, I16, I32, I64, called, filled, vector

HAS_PAIRS = "avx512bf16" in FEATURES
"""True if the processor multiplies pairs of bfloat16; if not, LLVM writes that out, which is right
and slow."""

HAS_BYTE_TABLES = HAS_PAIRS and "avx512vbmi" in FEATURES
"""True if it looks up bytes in tables as well."""

HAS_QUADS = all(name in FEATURES for name in ("avx512vnni", "avx512vbmi"))
"""True if the processor multiplies bytes by fours, and shifts each by itself; if not, LLVM writes
that out as well."""

HAS_WORD_TABLES = "avx512bw" in FEATURES
"""True if it looks up words of 16 bits in two vectors at once."""

HAS_WIDE_HALVES = "avx512f" in FEATURES
"""True if it widens 16 float16 at once."""

AHEAD = 4096
"""Bytes ahead of its products at which a kernel fetches a matrix's weights. The processor fetches
ahead by itself, but begins anew at the border of each page of 4 KiB."""

LANES = 16  # sums in a vector, each of pairs

_FAST = ("contract", "reassoc")


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


SUMS = vector(F32, LANES)
NUMBERS = vector(I16)
PAIRS = vector(I32, LANES)


def looked_up(builder: ir.IRBuilder, table: ir.Value, codes: ir.Value, shift: int) -> ir.Value:
    """Return the numbers of the codes at bit `shift` of 32 lanes of 16 bits, on processors with
    `HAS_PAIRS`. The table is there twice, so the bit above a code does not matter."""
    if shift:
        codes = builder.lshr(codes, filled(NUMBERS, shift))
    return called(builder, "llvm.x86.avx512.permvar.hi.512", NUMBERS, [table, codes])


def add_pairs(builder: ir.IRBuilder, sums: ir.Value, numbers: ir.Value, x: ir.Value) -> ir.Value:
    """Add the products of lanes 2 i and 2 i + 1 to sum i."""
    if HAS_PAIRS:
        operands = [builder.bitcast(operand, vector(BFloat())) for operand in (numbers, x)]
        return called(builder, "llvm.x86.avx512bf16.dpbf16ps.512", SUMS, [sums, *operands])
    for half in (_low, _high):
        sums = plus_product(builder, sums, half(builder, numbers), half(builder, x))
    return sums


def pairs_added(builder: ir.IRBuilder, numbers: ir.Value, x: ir.Value) -> ir.Value:
    """Return the products of 16 integers of 16 bits with x, each two added: int32 [8]."""
    if "avx2" in FEATURES:
        return called(builder, "llvm.x86.avx2.pmadd.wd", vector(I32, 8), [numbers, x])
    wide = [builder.sext(each, PAIRS) for each in (numbers, x)]
    products = builder.mul(*wide)
    return builder.add(
        *(chosen(builder, products, products, range(odd, LANES, 2)) for odd in (0, 1))
    )


def _low(builder: ir.IRBuilder, numbers: ir.Value) -> ir.Value:
    """Return the even lanes as float32."""
    return builder.bitcast(builder.shl(builder.bitcast(numbers, PAIRS), filled(PAIRS, 16)), SUMS)


def _high(builder: ir.IRBuilder, numbers: ir.Value) -> ir.Value:
    """Return the odd lanes as float32."""
    return builder.bitcast(
        builder.and_(builder.bitcast(numbers, PAIRS), filled(PAIRS, 0xFFFF0000)), SUMS
    )


def added_up(builder: ir.IRBuilder, sums: ir.Value) -> ir.Value:
    return called(builder, "llvm.vector.reduce.fadd.v16f32", F32, [ir.Constant(F32, 0.0), sums])


def each_added_up(builder: ir.IRBuilder, vectors: Sequence[ir.Value]) -> ir.Value:
    """Return a vector of the sums of 1, 2, 4, 8 or 16 vectors, each with the bits of `added_up`."""
    half = LANES // 2
    lanes = range(LANES)
    while len(vectors) > 1:  # halves of two vectors become one vector, whose lanes are added next
        near = [LANES + lane - half if lane & half else lane for lane in lanes]
        far = [lane + half for lane in near]
        pairs = zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :], strict=True)
        vectors = [
            builder.fadd(chosen(builder, *pair, near), chosen(builder, *pair, far))
            for pair in pairs
        ]
        half //= 2
    [total] = vectors
    while half:
        near = [lane for lane in range(total.type.count) if not lane & half]
        both = (
            chosen(builder, total, total, each) for each in (near, [lane + half for lane in near])
        )
        total = builder.fadd(*both)
        half = half // 2
    return total


def plus_product(builder: ir.IRBuilder, sums: ir.Value, numbers: ir.Value, x: ir.Value) -> ir.Value:
    return builder.fadd(sums, builder.fmul(numbers, x, flags=_FAST), flags=_FAST)


def prefetch(builder: ir.IRBuilder, address: ir.Value, offset: int = 0, *, cache: int = 1) -> None:
    """Fetch the bytes at `offset` behind any address into the nearest cache (1) or the second (2),
    without waiting."""
    place = builder.inttoptr(builder.add(address, I64(offset)), I8.as_pointer())
    # to read, data
    called(builder, "llvm.prefetch.p0", ir.VoidType(), [place, I32(0), I32(4 - cache), I32(1)])


def switched(
    builder: ir.IRBuilder, number: ir.Value, cases: Mapping[int, Callable[[], object]]
) -> None:
    """Write the code of every case, of which the one with this number runs; none for others."""
    end = builder.append_basic_block()
    switch = builder.switch(number, end)
    for case, write in cases.items():
        block = builder.append_basic_block()
        switch.add_case(I64(case), block)
        builder.position_at_end(block)
        write()
        builder.branch(end)
    builder.position_at_end(end)


def chosen(
    builder: ir.IRBuilder, first: ir.Value, second: ir.Value, lanes: Sequence[int]
) -> ir.Value:
    """Return a vector of the lanes of two vectors with these indices, which count the lanes of the
    second behind those of the first."""
    return builder.shuffle_vector(first, second, ir.Constant(vector(I32, len(lanes)), list(lanes)))
