"""Rows of ggml's types with grids times one token, in vectors. Importing this module imports numba.

A row is first read into the numbers of its points, its signs and its scales. The points of 32
weights are then loaded from the grid, int8, change their signs together, and are multiplied by x,
int16, in pairs, whose sums are exact.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.float16 import float16_as_float
from artifacts.common.llvm_vectors import (
    F32,
    I8,
    I16,
    I32,
    I64,
    addresses,
    advanced,
    called,
    filled,
    load,
    splat,
    spread,
    store,
    vector,
)
from runtime.kernels.cpu.lanes import LANES, pairs_added, plus_product, switched
from runtime.kernels.cpu.published.published import IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS

EIGHT = vector(F32, 8)
_AT_ONCE = 2  # steps of 32 weights
_SIGNS = vector(I8, 32)
_Read = tuple[ir.Value, ir.Value, ir.Value]
"""Numbers of points, int16; signs, int8 [32], a bit for each weight; scales, float32."""


def _half(builder: ir.IRBuilder, block: ir.Value, count: int, factor: float) -> ir.Value:
    """Return the scale of a block, times a factor, `count` times."""
    scale = float16_as_float(builder, load(builder, block, vector(I16, 1)))
    return builder.fmul(spread(builder, scale, [0] * count), filled(vector(F32, count), factor))


def _odd_times(builder: ir.IRBuilder, codes: ir.Value, scale: ir.Value) -> ir.Value:
    """Return 2 * code + 1 as float32 times the scale."""
    odd = builder.or_(builder.shl(codes, filled(codes.type, 1)), filled(codes.type, 1))
    return builder.fmul(builder.sitofp(odd, scale.type), scale)


def _nibbles(builder: ir.IRBuilder, packed: ir.Value) -> ir.Value:
    """Return the halves of bytes as int32, each byte's lower half first."""
    count = 2 * packed.type.count
    twice = builder.zext(
        spread(builder, packed, [i // 2 for i in range(count)]), vector(I32, count)
    )
    shifts = ir.Constant(twice.type, [0, 4] * packed.type.count)
    return builder.and_(builder.lshr(twice, shifts), filled(twice.type, 0xF))


def _in_sevens(builder: ir.IRBuilder, words: ir.Value) -> ir.Value:
    """Return the signs in the lower 28 bits of 8 words."""
    each = spread(builder, words, [i // 4 for i in range(32)])
    own = builder.lshr(each, ir.Constant(each.type, [0, 7, 14, 21] * 8))
    return _even(builder, builder.trunc(own, _SIGNS))


def _even(builder: ir.IRBuilder, signs: ir.Value) -> ir.Value:
    """Return signs whose eighth bit makes their number even."""
    seven = builder.and_(signs, filled(signs.type, 0x7F))
    count = called(builder, "llvm.ctpop.v32i8", signs.type, [seven])
    return builder.or_(seven, builder.shl(count, filled(signs.type, 7)))


def _bits(builder: ir.IRBuilder, packed: ir.Value) -> ir.Value:
    """Return whether the bits of bytes are set, the lowest of each byte first."""
    count = 8 * packed.type.count
    each = spread(builder, packed, [i // 8 for i in range(count)])
    own = ir.Constant(each.type, [1 << i % 8 for i in range(count)])
    return builder.icmp_unsigned("==", builder.and_(each, own), own)


def _read_2xxs(builder: ir.IRBuilder, block: ir.Value) -> _Read:
    packed = load(builder, block, vector(I8, 64), 2)
    points = spread(builder, packed, [8 * (i // 4) + i % 4 for i in range(32)])
    words = spread(builder, load(builder, block, vector(I32, 16), 2), range(1, 16, 2))
    scales = builder.lshr(words, filled(words.type, 28))
    return (
        builder.zext(points, vector(I16)),
        _in_sevens(builder, words),
        _odd_times(builder, scales, _half(builder, block, 8, 0.125)),
    )


def _read_2xs(builder: ir.IRBuilder, block: ir.Value) -> _Read:
    words = load(builder, block, vector(I16), 2)
    scales = _nibbles(builder, load(builder, block, vector(I8, 8), 66))
    return (
        builder.and_(words, filled(words.type, 0x1FF)),
        _even(builder, builder.trunc(builder.lshr(words, filled(words.type, 9)), _SIGNS)),
        _odd_times(builder, scales, _half(builder, block, 16, 0.125)),
    )


def _read_2s(builder: ir.IRBuilder, block: ir.Value) -> _Read:
    upper = spread(builder, load(builder, block, vector(I8, 8), 66), [i // 4 for i in range(32)])
    upper = builder.lshr(upper, ir.Constant(upper.type, [0, 2, 4, 6] * 8))
    upper = builder.zext(builder.and_(upper, filled(upper.type, 3)), vector(I16))
    points = builder.zext(load(builder, block, _SIGNS, 2), upper.type)
    scales = _nibbles(builder, load(builder, block, vector(I8, 8), 74))
    return (
        builder.or_(points, builder.shl(upper, filled(upper.type, 8))),
        load(builder, block, _SIGNS, 34),
        _odd_times(builder, scales, _half(builder, block, 16, 0.125)),
    )


def _read_3xxs(builder: ir.IRBuilder, block: ir.Value) -> _Read:
    words = load(builder, block, vector(I32, 8), 66)
    scales = builder.lshr(words, filled(words.type, 28))
    return (
        builder.zext(load(builder, block, vector(I8, 64), 2), vector(I16, 64)),
        _in_sevens(builder, words),
        _odd_times(builder, scales, _half(builder, block, 8, 0.25)),
    )


def _read_3s(builder: ir.IRBuilder, block: ir.Value) -> _Read:
    is_upper = _bits(builder, load(builder, block, vector(I8, 8), 66))
    wide = vector(I16, 64)
    points = builder.zext(load(builder, block, vector(I8, 64), 2), wide)
    scales = _nibbles(builder, load(builder, block, vector(I8, 4), 106))
    return (
        builder.or_(points, builder.shl(builder.zext(is_upper, wide), filled(wide, 8))),
        load(builder, block, _SIGNS, 74),
        _odd_times(builder, scales, _half(builder, block, 8, 1.0)),
    )


_READ = {
    IQ2_XXS: _read_2xxs,
    IQ2_XS: _read_2xs,
    IQ2_S: _read_2s,
    IQ3_XXS: _read_3xxs,
    IQ3_S: _read_3s,
}


@intrinsic
def read_row(context, kind, blocks, nbytes, num_blocks, worth, points, signs, scales):
    """Write the numbers of the points of a row of blocks of `nbytes`, uint16, the signs and the
    scales into these arrays. Each block's scales are multiplied by its number of `worth`."""

    def generate(target, builder, signature, arguments):
        kind, blocks, nbytes, num_blocks, *arrays = arguments
        own = addresses(target, builder, signature.args[4:], arrays)

        def write(read: Callable[..., _Read]) -> None:
            with cgutils.for_range(builder, num_blocks, intp=I64) as loop:
                block = advanced(builder, blocks, loop.index, nbytes)
                _store_read(builder, read(builder, block), loop.index, *own)

        switched(builder, kind, {number: partial(write, read) for number, read in _READ.items()})
        return target.get_dummy_value()

    return types.void(*[types.int64] * 4, worth, points, signs, scales), generate


def _store_read(
    builder: ir.IRBuilder, read: _Read, number: ir.Value, worth: ir.Value, *to: ir.Value
) -> None:
    """Write what was read of the block with this number."""
    points, signs, scales = read
    own = load(builder, advanced(builder, worth, number, 4), F32)
    scales = builder.fmul(scales, splat(builder, own, scales.type.count))
    for value, start in zip((points, signs, scales), to, strict=True):
        size = value.type.count * {I8: 1, I16: 2, F32: 4}[value.type.element]
        store(builder, value, advanced(builder, start, number, size))


class _Row(NamedTuple):
    """Addresses of the grid of a type, of x, and of a row that `read_row` has read."""

    grid: ir.Value
    x: ir.Value
    points: ir.Value
    signs: ir.Value
    scales: ir.Value


@intrinsic
def dot_points(context, kind, num_blocks, grid, x, points, signs, scales):
    """Return the product of x, int16, with a row that `read_row` has read. The points are in a
    grid of int8 at the address `grid`."""

    def generate(target, builder, signature, arguments):
        kind, num_blocks, grid, *arrays = arguments
        row = _Row(grid, *addresses(target, builder, signature.args[3:], arrays))
        total = cgutils.alloca_once_value(builder, filled(EIGHT, 0.0))
        counts = {IQ2_XXS: (4, 1), IQ2_XS: (4, 2), IQ2_S: (4, 2), IQ3_XXS: (8, 1), IQ3_S: (8, 1)}
        add = partial(_add_blocks, builder, row, num_blocks, total)
        switched(builder, kind, {number: partial(add, *own) for number, own in counts.items()})
        name = "llvm.vector.reduce.fadd.v8f32"
        return called(builder, name, F32, [ir.Constant(F32, 0.0), builder.load(total)])

    return types.float32(*[types.int64] * 3, x, points, signs, scales), generate


def _add_blocks(
    builder: ir.IRBuilder,
    row: _Row,
    num_blocks: ir.Value,
    total: ir.Value,
    num_points: int,
    num_scales: int,
) -> None:
    """Add the products of so many blocks to the sums at `total`. Each 32 weights have `num_points`
    and `num_scales`."""
    steps = builder.mul(num_blocks, I64(8 // _AT_ONCE))
    with cgutils.for_range(builder, steps, intp=I64) as loop:
        sums = builder.load(total)
        first = builder.mul(loop.index, I64(_AT_ONCE))
        for i in range(_AT_ONCE):
            step = builder.add(first, I64(i))
            sums = _add_step(builder, row, step, num_points, num_scales, sums)
        builder.store(sums, total)


def _add_step(
    builder: ir.IRBuilder,
    row: _Row,
    step: ir.Value,
    num_points: int,
    num_scales: int,
    sums: ir.Value,
) -> ir.Value:
    """Add the products of the 32 weights with this number, which have so many points and scales."""
    points = advanced(builder, row.points, step, 2 * num_points)
    numbers = _looked_up(builder, row.grid, points, num_points)
    numbers = _signed(builder, numbers, advanced(builder, row.signs, step, 4))
    halves = products_of_32(builder, numbers, advanced(builder, row.x, step, 64))
    if num_scales == 1:
        halves = [builder.add(*halves)]
    scales = advanced(builder, row.scales, step, 4 * num_scales)
    for i, products in enumerate(halves):
        scale = splat(builder, load(builder, scales, F32, 4 * i), 8)
        sums = plus_product(builder, sums, builder.sitofp(products, EIGHT), scale)
    return sums


def _looked_up(builder: ir.IRBuilder, grid: ir.Value, points: ir.Value, count: int) -> ir.Value:
    """Return 32 bytes of a grid: `count` points with the numbers at an address."""
    nbytes = 32 // count
    kind = ir.IntType(8 * nbytes)
    out = ir.Constant(vector(kind, count), ir.Undefined)
    for i in range(count):
        number = builder.zext(load(builder, points, I16, 2 * i), I64)
        point = load(builder, advanced(builder, grid, number, nbytes), kind)
        out = builder.insert_element(out, point, I32(i))
    return builder.bitcast(out, vector(I8))


def _signed(builder: ir.IRBuilder, numbers: ir.Value, signs: ir.Value) -> ir.Value:
    """Return 32 numbers, int8, which are negative where their bit at this address is set."""
    mask = builder.sext(_bits(builder, load(builder, signs, vector(I8, 4))), numbers.type)
    return builder.sub(builder.xor(numbers, mask), mask)


def products_of_32(builder: ir.IRBuilder, numbers: ir.Value, x: ir.Value) -> list[ir.Value]:
    """Return the products of either half of 32 numbers, int8, with x, int16, summed in pairs:
    int32 [8]."""
    halves = []
    for first in (0, LANES):
        own = spread(builder, numbers, range(first, first + LANES))
        own = builder.sext(own, vector(I16, LANES))
        halves.append(pairs_added(builder, own, load(builder, x, own.type, 2 * first)))
    return halves
