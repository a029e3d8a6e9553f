"""Rows times factors, added to rows in vectors of 16 floats. Importing this module imports numba.

Float32 in one order, without fused operations: the same sums on every machine.
"""

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from artifacts.common.llvm_vectors import F32, I64, advanced, load, splat, store, vector
from artifacts.common.numba_loops import exact_part, kernel

BLOCK = 16
"""Rows that are multiplied together."""

_LANES = 16
_FLOATS = vector(F32, _LANES)
_AT_ONCE = 4  # rows that are added to: each of the others is loaded once for all of them


def _added(
    builder: ir.IRBuilder,
    is_less: bool,
    targets: Sequence[ir.Value],
    factors: Sequence[ir.Value],
    others: Callable,
) -> None:
    """Add to vectors at the addresses `targets` products of factors, which lie at an address for
    each, and `others`."""
    sums = [load(builder, target, _FLOATS) for target in targets]
    take = builder.fsub if is_less else builder.fadd
    for row in range(BLOCK):
        other = others(row)
        for place, address in enumerate(factors):
            factor = splat(builder, load(builder, address, F32, 4 * row), _LANES)
            sums[place] = take(sums[place], builder.fmul(factor, other))
    for total, target in zip(sums, targets, strict=True):
        store(builder, total, target)


def _adder(is_less: bool) -> Callable[..., None]:
    """Return
    `add(target, target_stride, count, factors, factors_stride, rows, rows_stride, num_vectors)`. It
    adds the 16 rows at `rows`, each times its factor, one after the other, to each of `count` rows
    at `target`, or subtracts them. A target's 16 factors lie side by side. Addresses, and strides
    in bytes."""

    @intrinsic
    def add(
        context,
        target,
        target_stride,
        count,
        factors,
        factors_stride,
        rows,
        rows_stride,
        num_vectors,
    ):
        def generate(machine, builder, _, arguments):
            (
                target,
                target_stride,
                count,
                factors,
                factors_stride,
                rows,
                rows_stride,
                num_vectors,
            ) = arguments

            def add_to(first: ir.Value, number: int) -> None:
                places = [builder.add(first, I64(place)) for place in range(number)]
                targets = [advanced(builder, target, place, target_stride) for place in places]
                own = [advanced(builder, factors, place, factors_stride) for place in places]
                with cgutils.for_range(builder, num_vectors, intp=I64) as loop:
                    offset = builder.mul(loop.index, I64(4 * _LANES))

                    def other(row: int) -> ir.Value:
                        place = advanced(builder, rows, I64(row), rows_stride)
                        return load(builder, builder.add(place, offset), _FLOATS)

                    _added(
                        builder,
                        is_less,
                        [builder.add(each, offset) for each in targets],
                        own,
                        other,
                    )

            several = builder.udiv(count, I64(_AT_ONCE))
            with cgutils.for_range(builder, several, intp=I64) as loop:
                add_to(builder.mul(loop.index, I64(_AT_ONCE)), _AT_ONCE)
            begun = builder.mul(several, I64(_AT_ONCE))
            with cgutils.for_range(builder, builder.sub(count, begun), intp=I64) as loop:
                add_to(builder.add(begun, loop.index), 1)
            return machine.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return add


_plus = _adder(False)
_minus = _adder(True)


@kernel("void(boolean, UniTuple(int64, 8))", exact=True, nogil=True)
def add_vectors(is_less, operands):
    """Add or subtract as `_adder` does. It is compiled once for all that call it."""
    if is_less:
        _minus(*operands)
    else:
        _plus(*operands)


@exact_part
def add_products(target, places, span, source, block, rows, is_less):
    """Add `source[p, i] * rows[i - first]` to `target[p]`, or subtract it, for one i in the range
    `block`, from `first` on, after the other, for each p in the range `places` and at the numbers
    in the range `span`. Source may be the target, where block and span have nothing in common."""
    start, stop = places
    begin, end = span
    first, last = block
    done = begin
    if last - first == BLOCK and stop > start:
        num_vectors = (end - begin) // _LANES
        given = (
            target[start:, begin:].ctypes.data,
            target.strides[0],
            stop - start,
            source[start:, first:].ctypes.data,
            source.strides[0],
            rows[:, begin:].ctypes.data,
            rows.strides[0],
            num_vectors,
        )
        add_vectors(is_less, given)
        done += _LANES * num_vectors
    for place in range(start, stop if done < end else start):
        for i in range(first, last):
            factor = -source[place, i] if is_less else source[place, i]
            for number in range(done, end):
                target[place, number] += factor * rows[i - first, number]
