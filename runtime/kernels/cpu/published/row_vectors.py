"""Four rows of codes times a token in 16 bits, written in vectors for processors with
`lanes.HAS_BYTE_TABLES`.

Codes are taken in steps of 64 bytes. Their numbers, bfloat16, are looked up in tables, 32 to a
vector, and multiplied with x by pairs of neighbours; an x in float16 is the sum of two numbers in
bfloat16. Four rows share the loads of x. The codes of the next four rows are prefetched in the
order of memory, because the processor would not recognise four rows at a time as a stream. Operands
are int64 addresses and counts. Importing this module imports numba.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import (
    F32,
    I8,
    I32,
    I64,
    advanced,
    called,
    filled,
    load,
    splat,
    store,
    vector,
)
from runtime.kernels.cpu.lanes import (
    LANES,
    NUMBERS,
    PAIRS,
    SUMS,
    add_pairs,
    looked_up,
    plus_product,
    prefetch,
)

ROWS = 4
STEP_NBYTES = 64
# The order of the inputs in a step: [a, b, c] as they are stored becomes [b, a, c]. Codes of 4 bits
# are taken from the lowest of each 16 bits on, of 16 codes of 8 bits first eight.
HALF_BYTES_TURNED = (32, 4, 1)
BYTES_TURNED = (4, 2, 8)

_AHEAD = 2048  # bytes behind the next rows, which may be short
_BYTES = vector(I8, STEP_NBYTES)
_FOUR = vector(F32, ROWS)


class _Codes(NamedTuple):
    """Conversion of codes to numbers.

    It has the type and number of its tables, the vectors of numbers in a step, and the bytes of the
    last step of a row that ends with 64 inputs more than whole steps."""

    table: ir.VectorType
    num_tables: int
    num_vectors: int
    last_nbytes: int
    numbers: Callable[[ir.IRBuilder, Sequence[ir.Value], ir.Value], list[ir.Value]]


def _of_half_bytes(
    builder: ir.IRBuilder, tables: Sequence[ir.Value], codes: ir.Value
) -> list[ir.Value]:
    codes = builder.bitcast(codes, NUMBERS)
    return [looked_up(builder, tables[0], codes, 4 * place) for place in range(4)]


def _of_floats(
    builder: ir.IRBuilder, tables: Sequence[ir.Value], codes: ir.Value
) -> list[ir.Value]:
    """Return the numbers of floats, whose sign is the sign of their code."""
    low, high = (_looked_up(builder, tables[first : first + 2], codes) for first in (0, 2))
    return _side_by_side(builder, low, builder.or_(high, builder.and_(codes, filled(_BYTES, 0x80))))


def _of_integers(
    builder: ir.IRBuilder, tables: Sequence[ir.Value], codes: ir.Value
) -> list[ir.Value]:
    """Return the numbers of integers; codes above 127 have tables of their own."""
    is_above = builder.icmp_signed("<", codes, filled(_BYTES, 0))
    planes = []
    for first in (0, 4):
        below, above = (
            _looked_up(builder, tables[at : at + 2], codes) for at in (first, first + 2)
        )
        planes.append(builder.select(is_above, above, below))
    return _side_by_side(builder, *planes)


def _looked_up(builder: ir.IRBuilder, tables: Sequence[ir.Value], codes: ir.Value) -> ir.Value:
    """Return the bytes of two tables of 64 at the low seven bits of the codes."""
    return called(
        builder, "llvm.x86.avx512.vpermi2var.qi.512", _BYTES, [tables[0], codes, tables[1]]
    )


def _side_by_side(builder: ir.IRBuilder, low: ir.Value, high: ir.Value) -> list[ir.Value]:
    """Return the numbers that consist of these low and high bytes."""
    vectors = []
    for first in (0, 8):
        lanes = [
            16 * (k // 16) + first + k % 16 // 2 + STEP_NBYTES * (k % 2) for k in range(STEP_NBYTES)
        ]
        vectors.append(builder.bitcast(_shuffled(builder, low, high, lanes), NUMBERS))
    return vectors


def _shuffled(
    builder: ir.IRBuilder, first: ir.Value, second: ir.Value, lanes: Sequence[int]
) -> ir.Value:
    return builder.shuffle_vector(first, second, ir.Constant(vector(I32, len(lanes)), list(lanes)))


_HALF_BYTES = _Codes(NUMBERS, 1, 4, STEP_NBYTES // 2, _of_half_bytes)
_FLOATS = _Codes(_BYTES, 4, 2, STEP_NBYTES, _of_floats)
_INTEGERS = _Codes(_BYTES, 8, 2, STEP_NBYTES, _of_integers)


class _Rows:
    """Four rows of codes, `stride` bytes apart, and their sums."""

    def __init__(
        self,
        builder: ir.IRBuilder,
        kind: _Codes,
        codes: ir.Value,
        stride: ir.Value,
        tables: ir.Value,
    ) -> None:
        self._builder = builder
        self._kind = kind
        self._starts = [advanced(builder, codes, I64(row), stride) for row in range(ROWS)]
        self._next = advanced(builder, codes, I64(ROWS), stride)
        self._tables = [
            load(builder, tables, kind.table, STEP_NBYTES * place)
            for place in range(kind.num_tables)
        ]
        self._sums = [cgutils.alloca_once_value(builder, filled(SUMS, 0.0)) for _ in range(ROWS)]

    def numbers(self, row: int, step: ir.Value, *, is_last: bool) -> list[ir.Value]:
        """Return the vectors of numbers of a step."""
        builder = self._builder
        address = advanced(self._builder, self._starts[row], step, STEP_NBYTES)
        prefetch(
            builder,
            advanced(builder, self._next, step, ROWS * STEP_NBYTES),
            _AHEAD + STEP_NBYTES * row,
        )
        codes = load(
            builder, address, vector(I8, self._kind.last_nbytes if is_last else STEP_NBYTES)
        )
        if codes.type.count < STEP_NBYTES:
            codes = _shuffled(builder, codes, filled(codes.type, 0), range(STEP_NBYTES))
        return self._kind.numbers(builder, self._tables, codes)

    def vectors_of(self, x: ir.Value, step: ir.Value, count: int) -> list[ir.Value]:
        """Return the `count` vectors of x for a step."""
        place = advanced(self._builder, x, step, STEP_NBYTES * count)
        return [load(self._builder, place, NUMBERS, STEP_NBYTES * i) for i in range(count)]

    def plus_products(
        self, sums: ir.Value, row: int, step: ir.Value, tokens: Sequence[ir.Value], *, is_last: bool
    ) -> ir.Value:
        """Add the products of a step's vectors with the vectors of each token in turn."""
        numbers = self.numbers(row, step, is_last=is_last)
        for i, token in enumerate(tokens):
            sums = add_pairs(self._builder, sums, numbers[i % len(numbers)], token)
        return sums

    def add(self, row: int, products: ir.Value, scale: ir.Value) -> None:
        sums = plus_product(self._builder, self._builder.load(self._sums[row]), products, scale)
        self._builder.store(sums, self._sums[row])

    def add_to(self, y: ir.Value) -> None:
        """Add the sum of each row to four float32."""
        sums = _added_up(self._builder, [self._builder.load(own) for own in self._sums])
        store(self._builder, self._builder.fadd(load(self._builder, y, _FOUR), sums), y)


def _added_up(builder: ir.IRBuilder, sums: Sequence[ir.Value]) -> ir.Value:
    """Return the sum of each of four vectors."""
    total = _neighbours_added(
        builder, *(_neighbours_added(builder, *sums[at : at + 2], 1) for at in (0, 2)), 2
    )
    for count in (8, 4):
        total = builder.fadd(
            *(_shuffled(builder, total, total, range(at, at + count)) for at in (0, count))
        )
    return total


def _neighbours_added(
    builder: ir.IRBuilder, first: ir.Value, second: ir.Value, width: int
) -> ir.Value:
    """Return the sums of neighbouring runs of `width` lanes, of the first vector and of the second
    in turn."""
    runs = np.arange(2 * LANES).reshape(2, -1, 2, width)  # vector, pair of runs, run, lane
    return builder.fadd(
        *(_shuffled(builder, first, second, runs[:, :, i].swapaxes(0, 1).flat) for i in range(2))
    )


def _in_order(kind: _Codes, *, has_zeros: bool) -> Callable[..., None]:
    """Return `add(codes, stride, x, tables, scales, next_scales, per_step, groups, steps, rest,
    zeros, sums_x, y)`, which adds the products of four rows to y.

    There are `groups` groups of `steps` steps each, then `rest` steps, 0 or 1. The scales of a
    group, float32, begin `per_step` scales behind those of the group before it, and are divided
    among the lanes of a step. The scales of a row begin `next_scales` bytes behind those of the row
    before it. Zero-points lie as scales do; `sums_x` has minus the sum of x of each lane of a step.
    x is an array [steps, .], or [steps, n, .] of n parts that add up to it."""

    @intrinsic
    def add(
        context,
        codes,
        stride,
        x,
        tables,
        scales,
        next_scales,
        per_step,
        groups,
        steps,
        rest,
        zeros,
        sums_x,
        y,
    ):
        def generate(target, builder, signature, arguments):
            (
                codes,
                stride,
                x,
                tables,
                scales,
                next_scales,
                per_step,
                groups,
                steps,
                rest,
                zeros,
                sums_x,
                y,
            ) = arguments
            x = builder.ptrtoint(target.make_array(signature.args[2])(target, builder, x).data, I64)
            rows = _Rows(builder, kind, codes, stride, tables)
            lanes = _lanes(builder, per_step)

            def of_lanes(numbers: ir.Value, group: ir.Value, row: int) -> ir.Value:
                own = builder.add(
                    builder.mul(builder.mul(group, per_step), I64(4)),
                    builder.mul(next_scales, I64(row)),
                )
                return _of_lanes(builder, builder.add(numbers, own), lanes)

            def add_step(step: ir.Value, group: ir.Value, *, is_last: bool) -> None:
                tokens = rows.vectors_of(x, step, num_vectors)
                for row in range(ROWS):
                    products = filled(SUMS, 0.0)
                    if has_zeros:
                        sum_x = load(builder, advanced(builder, sums_x, step, 64), SUMS)
                        products = builder.fmul(of_lanes(zeros, group, row), sum_x)
                    products = rows.plus_products(products, row, step, tokens, is_last=is_last)
                    rows.add(row, products, of_lanes(scales, group, row))

            with (
                cgutils.for_range(builder, groups, intp=I64) as outer,
                cgutils.for_range(builder, steps) as inner,
            ):
                add_step(
                    builder.add(builder.mul(outer.index, steps), inner.index),
                    outer.index,
                    is_last=False,
                )
            with builder.if_then(builder.icmp_signed(">", rest, I64(0))):
                add_step(builder.mul(groups, steps), groups, is_last=True)
            rows.add_to(y)
            return target.get_dummy_value()

        num_vectors = kind.num_vectors * (x.ndim - 1)
        return types.void(*[types.int64] * 2, x, *[types.int64] * 10), generate

    return add


def _of_lanes(builder: ir.IRBuilder, address: ir.Value, lanes: ir.Value) -> ir.Value:
    """Return the scale of each lane."""
    return called(
        builder, "llvm.x86.avx512.permvar.sf.512", SUMS, [load(builder, address, SUMS), lanes]
    )


def _lanes(builder: ir.IRBuilder, per_step: ir.Value) -> ir.Value:
    """Return, for each lane, the index of its scale among the scales of a step."""
    lane = ir.Constant(PAIRS, list(range(LANES)))
    return builder.lshr(
        builder.mul(lane, splat(builder, builder.trunc(per_step, I32))), filled(PAIRS, 4)
    )


half_bytes, half_bytes_less_zeros = (_in_order(_HALF_BYTES, has_zeros=has) for has in (False, True))
integers, integers_less_zeros = (_in_order(_INTEGERS, has_zeros=has) for has in (False, True))
floats = _in_order(_FLOATS, has_zeros=False)
