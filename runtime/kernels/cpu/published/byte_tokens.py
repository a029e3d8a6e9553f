"""Tokens that are rounded to 8 bits, and their products with codes of 8 bits. Importing this module
imports numba.

A block of 32 numbers is rounded as llama.cpp's Q8_0 is: its largest is 127, halves go away from
zero. A sum of 32 products is exact, in eight parts of four each, so that processors with and
without AVX-512's integers give the same bits.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import (
    F32,
    FEATURES,
    I8,
    I16,
    I32,
    I64,
    called,
    filled,
    load,
    splat,
    spread,
    store,
    vector,
)
from runtime.kernels.cpu.lanes import LANES, pairs_added

_HAS_FOURS = "avx512vl" in FEATURES and "avx512vnni" in FEATURES or "avxvnni" in FEATURES
_NUMBERS = vector(F32)
_WORDS = vector(I16, LANES)
_PARTS = vector(I32, 8)
_SIGN = 0x80  # with it, signed codes become unsigned ones that are larger by as much
_LEAST = 1e-30  # a worth below it has no inverse


@intrinsic
def round_block(context, x, token, worth):
    """Round 32 float32 at x to a block of a token, 64 bytes, and write the worth of one, float32.
    Where x has NaN or infinity the worth is not finite either. Operands are int64 addresses.

    The block has 32 numbers, int8, and for each four of them what their codes' sign adds to a sum,
    negative, int32; where processors multiply no fours, 16 numbers at even places and then 16 at
    odd ones, int16."""

    def generate(target, builder, signature, arguments):
        numbers = load(builder, arguments[0], _NUMBERS)
        sizes = called(builder, "llvm.fabs.v32f32", _NUMBERS, [numbers])
        bits = builder.bitcast(sizes, vector(I32))
        largest = called(builder, "llvm.vector.reduce.umax.v32i32", I32, [bits])
        largest = builder.bitcast(largest, F32)
        store(builder, builder.fdiv(largest, F32(127.0)), arguments[2])
        inverse = builder.select(
            builder.fcmp_ordered(">", largest, F32(_LEAST)),
            builder.fdiv(F32(127.0), largest),
            F32(0.0),
        )
        scaled = builder.fmul(numbers, splat(builder, inverse, 32))
        whole = called(builder, "llvm.round.v32f32", _NUMBERS, [scaled])
        whole = builder.fptosi(whole, vector(I32))
        _store_block(builder, whole, arguments[1])
        return target.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


def _store_block(builder: ir.IRBuilder, whole: ir.Value, token: ir.Value) -> None:
    if not _HAS_FOURS:
        words = builder.trunc(whole, vector(I16))
        order = [*range(0, 32, 2), *range(1, 32, 2)]
        store(builder, spread(builder, words, order), token)
        return
    numbers = builder.trunc(whole, vector(I8))
    store(builder, numbers, token)
    signs = _add_fours(builder, filled(_PARTS, 0), filled(numbers.type, _SIGN), numbers)
    store(builder, builder.sub(filled(_PARTS, 0), signs), builder.add(token, I64(32)))


def products_of_bytes(builder: ir.IRBuilder, codes: ir.Value, x: ir.Value) -> list[ir.Value]:
    """Return the products of 32 codes, int8, with a block of a token at x, summed by fours:
    int32 [8], in one or two summands."""
    if _HAS_FOURS:
        own = builder.xor(codes, filled(codes.type, _SIGN))
        signs = load(builder, x, _PARTS, 32)
        return [_add_fours(builder, signs, own, load(builder, x, codes.type)), filled(_PARTS, 0)]
    words = builder.bitcast(codes, _WORDS)
    odd = builder.ashr(words, filled(_WORDS, 8))
    even = builder.ashr(builder.shl(words, filled(_WORDS, 8)), filled(_WORDS, 8))
    return [
        pairs_added(builder, own, load(builder, x, _WORDS, place))
        for own, place in ((even, 0), (odd, 32))
    ]


def _add_fours(
    builder: ir.IRBuilder, sums: ir.Value, codes: ir.Value, numbers: ir.Value
) -> ir.Value:
    """Add the products of four codes without sign with four numbers to each of eight sums."""
    fours = [builder.bitcast(each, _PARTS) for each in (codes, numbers)]
    return called(builder, "llvm.x86.avx512.vpdpbusd.256", _PARTS, [sums, *fours])
