"""The cost of errors for groups of rows, each group with a Hessian of its own: factors, solutions,
products. Importing this module imports numba.

Matrices are [places, in] or, where a public function takes one, [in, places], places by group.
Float32 in one order, without fused operations, so that codes are the same on every machine.
"""

import numpy as np

from artifacts.common.numba_loops import exact_part, kernel
from artifacts.common.transposition import transpose
from artifacts.quantisation.trellis.trellis_products import BLOCK, add_products


@exact_part
def transposed(columns: np.ndarray) -> np.ndarray:
    rows = np.empty(columns.shape[::-1], columns.dtype)
    transpose(columns, rows)
    return rows


@kernel("void(f4[:,:,::1], f4[:,::1], f4[::1])", exact=True, nogil=True)
def factorise(hessians: np.ndarray, pivots: np.ndarray, ridges: np.ndarray) -> None:
    """Turn Hessians [G, in, in], with `ridges` [G] added to their diagonals, into unit factors and
    `pivots` [G, in]: H = L diag(pivots) L^T. L[l, j] is left at [g, j, l] and at [g, l, j]. A pivot
    is at least the ridge."""
    size = hessians.shape[1]
    columns = np.empty((BLOCK, size), np.float32)
    ratios = np.empty((BLOCK, size), np.float32)
    for group in range(hessians.shape[0]):
        matrix = hessians[group]
        ridge = ridges[group]
        for first in range(0, size, BLOCK):
            end = min(first + BLOCK, size)
            for column in range(first, end):
                mine = columns[column - first]
                ratio = ratios[column - first]
                mine[first:] = matrix[column, first:]
                before = column - first
                for other in range(before):
                    factor = ratios[other, column]
                    row = columns[other]
                    for place in range(first, size):
                        mine[place] -= factor * row[place]
                pivot = max(mine[column] + ridge, ridge)
                pivots[group, column] = pivot
                np.divide(mine[column + 1 :], pivot, ratio[column + 1 :])
                matrix[column, column + 1 :] = ratio[column + 1 :]
            for row in range(first + 1, size):
                for column in range(first, min(row, end)):
                    matrix[row, column] = ratios[column - first, row]
            # with what is left of the diagonal there, which is written anew
            for row in range(end, size, BLOCK):
                rows = (row, min(row + BLOCK, size))
                add_products(
                    matrix, rows, (row, size), matrix, (first, end), columns[: end - first], True
                )


@exact_part
def pass_down(
    target: np.ndarray,
    source: np.ndarray,
    ratios: np.ndarray,
    ends: np.ndarray,
    block: tuple[int, int],
    is_less: bool,
) -> None:
    """Add `L[l, j] source[:, l]` to each `target[:, j]`, or subtract it, for all l in the range
    `block` and all j below it; target, source [places, in]."""
    first, end = block
    start = 0
    for group in range(ends.size):
        add_products(
            target,
            (start, ends[group]),
            (0, first),
            source,
            block,
            ratios[group, first:end],
            is_less,
        )
        start = ends[group]


@exact_part
def down_within(
    target: np.ndarray,
    source: np.ndarray,
    ratios: np.ndarray,
    ends: np.ndarray,
    block: tuple[int, int],
    is_less: bool,
) -> None:
    """Add `L[l, j] source[:, l]` to each `target[:, j]`, or subtract it, for all l and j in the
    range `block` with l > j, the last l first: `pass_down` within a block. Source may be the
    target."""
    first, end = block
    start = 0
    sign = np.float32(-1 if is_less else 1)
    for group in range(ends.size):
        own = ratios[group]
        for place in range(start, ends[group]):
            for later in range(end - 1, first, -1):
                value = sign * source[place, later]
                for column in range(first, later):
                    target[place, column] += value * own[later, column]
        start = ends[group]


@exact_part
def _pass_up(
    rows: np.ndarray, ratios: np.ndarray, ends: np.ndarray, block: tuple[int, int]
) -> None:
    """Subtract `L[l, j] rows[:, j]` from each `rows[:, l]`, for all j in the range `block` and all
    l > j."""
    first, end = block
    start = 0
    for group in range(ends.size):
        factors = ratios[group, first:end]
        for place in range(start, ends[group]):
            own = rows[place]
            for column in range(first, end):
                for later in range(column + 1, end):
                    own[later] -= factors[column - first, later] * own[column]
        add_products(rows, (start, ends[group]), (end, rows.shape[1]), rows, block, factors, True)
        start = ends[group]


@kernel("void(f4[:,:,::1], f4[:,::1], i4[::1], f4[:,::1])", exact=True, nogil=True)
def solve(ratios: np.ndarray, pivots: np.ndarray, ends: np.ndarray, columns: np.ndarray) -> None:
    """Multiply each place of `columns` [in, places] by the inverse of its group's factorised
    Hessian, in place."""
    size = len(columns)
    rows = transposed(columns)
    for first in range(0, size, BLOCK):
        _pass_up(rows, ratios, ends, (first, min(first + BLOCK, size)))
    start = 0
    for group in range(ends.size):
        for place in range(start, ends[group]):
            rows[place] /= pivots[group]
        start = ends[group]
    for end in range(size, 0, -BLOCK):
        first = max(end - BLOCK, 0)
        down_within(rows, rows, ratios, ends, (first, end), True)
        pass_down(rows, rows, ratios, ends, (first, end), True)
    transpose(rows, columns)


@kernel("void(f4[:,:,::1], i4[::1], f4[:,::1], f4[:,::1])", exact=True, nogil=True)
def weigh(ratios: np.ndarray, ends: np.ndarray, columns: np.ndarray, weighed: np.ndarray) -> None:
    """Write L^T times each place of `columns` [in, places] to `weighed`, L being its group's
    factor."""
    rows = transposed(columns)
    sums = rows.copy()
    for end in range(len(columns), 0, -BLOCK):
        first = max(end - BLOCK, 0)
        down_within(sums, rows, ratios, ends, (first, end), False)
        pass_down(sums, rows, ratios, ends, (first, end), False)
    transpose(sums, weighed)
