"""Transposition of matrices, in vectors for numbers of 16 and 32 bits. Importing this module
imports numba."""

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import I16, I32, I64, advanced, load, store, vector
from artifacts.common.numba_loops import exact_part

_SIDE = 8  # rows and columns of a block


def _halves(builder: ir.IRBuilder, one: ir.Value, other: ir.Value) -> list[ir.Value]:
    """Two vectors in turns, as two vectors."""
    count = one.type.count
    lanes = [lane // 2 + count * (lane % 2) for lane in range(2 * count)]
    kind = vector(I32, count)
    return [
        builder.shuffle_vector(one, other, ir.Constant(kind, lanes[i : i + count]))
        for i in (0, count)
    ]


def in_turns(builder: ir.IRBuilder, rows: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """Return eight vectors as the rows of a matrix, read column by column."""
    for _ in range(3):  # each moves one bit of the row's number into the column's
        pairs = [_halves(builder, *pair) for pair in zip(rows[:4], rows[4:], strict=True)]
        rows = [half for pair in pairs for half in pair]
    return rows


def _of_rows(element: ir.Type) -> Callable[..., None]:
    """Return `transpose(source, source_stride, out, out_stride, count)`. It transposes `count`
    blocks of 8 x 8 numbers that lie below each other at `source`, and beside each other at `out`;
    strides are in bytes."""
    numbers = vector(element, _SIDE)

    @intrinsic
    def transpose(context, source, source_stride, out, out_stride, count):
        def generate(target, builder, _, arguments):
            source, source_stride, out, out_stride, count = arguments
            with cgutils.for_range(builder, count) as loop:
                below = advanced(
                    builder, source, loop.index, builder.mul(source_stride, I64(_SIDE))
                )
                beside = advanced(builder, out, loop.index, _SIDE * element.width // 8)
                places = [advanced(builder, below, I64(row), source_stride) for row in range(_SIDE)]
                rows = in_turns(builder, [load(builder, place, numbers) for place in places])
                for row, own in enumerate(rows):
                    store(builder, own, advanced(builder, beside, I64(row), out_stride))
            return target.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return transpose


_transpose_halves = _of_rows(I16)
_transpose_words = _of_rows(I32)


@exact_part
def transpose(source, out):
    """Write out[c, r] = source[r, c]. Only what fits no block of 8 x 8 numbers of 16 or 32 bits is
    moved one by one."""
    num_rows, num_columns = source.shape
    fast_rows = 0
    fast_columns = 0
    if source.itemsize in (2, 4):
        fast_rows = num_rows // _SIDE * _SIDE
        fast_columns = num_columns // _SIDE * _SIDE
    begin = source.ctypes.data
    source_stride = source.strides[0]
    target = out.ctypes.data
    out_stride = out.strides[0]
    nbytes = source.itemsize
    for c in range(0, fast_columns, _SIDE):
        own = (
            begin + nbytes * c,
            source_stride,
            target + c * out_stride,
            out_stride,
            fast_rows // _SIDE,
        )
        if nbytes == 2:
            _transpose_halves(*own)
        else:
            _transpose_words(*own)
    for c in range(num_columns):
        for r in range(fast_rows if c < fast_columns else 0, num_rows):
            out[c, r] = source[r, c]
