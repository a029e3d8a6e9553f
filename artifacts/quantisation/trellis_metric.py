"""The cost of errors for groups of rows, each group with a Hessian of its own: factors, solutions, products. Importing
this module imports numba.

Matrices are [places, in] or, where a public function takes one, [in, places], places by group. Float32 in one order,
without fused operations, so that codes are the same on every machine.
"""

import numpy as np

from artifacts.common.numba_loops import exact_part, kernel
from artifacts.common.transposition import transpose

BLOCK = 16
"""Columns that are passed on together: of so many, what every other column reads stays in the cache."""

_TOGETHER = 8  # of these, whose products are added to a number before it is stored


@exact_part
def transposed(columns: np.ndarray) -> np.ndarray:
    rows = np.empty(columns.shape[::-1], columns.dtype)
    transpose(columns, rows)
    return rows


@exact_part
def _add(target: np.ndarray, factors: np.ndarray, rows: np.ndarray, places: tuple[int, int], sign: float) -> None:
    """Add `sign * factors[i] rows[i]` to `target`, for one i after the other, at a range of places."""
    first, end = places
    own, i = target[first:end], 0
    while i + _TOGETHER <= factors.size:
        s, t, u, v = sign * factors[i], sign * factors[i + 1], sign * factors[i + 2], sign * factors[i + 3]
        w, x, y, z = sign * factors[i + 4], sign * factors[i + 5], sign * factors[i + 6], sign * factors[i + 7]
        a, b, c, d = rows[i][first:end], rows[i + 1][first:end], rows[i + 2][first:end], rows[i + 3][first:end]
        e, f, g, h = rows[i + 4][first:end], rows[i + 5][first:end], rows[i + 6][first:end], rows[i + 7][first:end]
        for place in range(own.size):
            value = own[place] + s * a[place] + t * b[place] + u * c[place] + v * d[place]
            own[place] = value + w * e[place] + x * f[place] + y * g[place] + z * h[place]
        i += _TOGETHER
    for other in range(i, factors.size):
        factor, row = sign * factors[other], rows[other][first:end]
        for place in range(own.size):
            own[place] += factor * row[place]


@kernel("void(f4[:,:,::1], f4[:,::1], f4[::1])", exact=True, nogil=True)
def factorise(hessians: np.ndarray, pivots: np.ndarray, ridges: np.ndarray) -> None:
    """Turn Hessians [G, in, in], with `ridges` [G] added to their diagonals, into unit factors and `pivots` [G, in]:
    H = L diag(pivots) L^T, where L[l, j] is left at [g, j, l] and at [g, l, j]. A pivot is at least the ridge."""
    size, less = hessians.shape[1], np.float32(-1)
    columns, ratios = np.empty((BLOCK, size), np.float32), np.empty((BLOCK, size), np.float32)
    for group in range(hessians.shape[0]):
        matrix, ridge = hessians[group], ridges[group]
        for first in range(0, size, BLOCK):
            end = min(first + BLOCK, size)
            for column in range(first, end):
                mine, ratio = columns[column - first], ratios[column - first]
                mine[first:] = matrix[column, first:]
                before = column - first
                _add(mine, ratios[:before, column], columns, (first, size), less)
                pivot = max(mine[column] + ridge, ridge)
                pivots[group, column] = pivot
                np.divide(mine[column + 1 :], pivot, ratio[column + 1 :])
                matrix[column, column + 1 :] = ratio[column + 1 :]
            for row in range(first + 1, size):
                for column in range(first, min(row, end)):
                    matrix[row, column] = ratios[column - first, row]
            for row in range(end, size):
                begin = row // BLOCK * BLOCK  # whole vectors; what is left of the diagonal is written anew
                _add(matrix[row], ratios[: end - first, row], columns, (begin, size), less)


@exact_part
def pass_down(
    target: np.ndarray, source: np.ndarray, ratios: np.ndarray, ends: np.ndarray, block: tuple[int, int], sign: float
) -> None:
    """Add `sign * L[l, j] source[:, l]` to each `target[:, j]`, for all l in the range `block` and all j below it;
    target, source [places, in]."""
    first, end = block
    start = 0
    for group in range(ends.size):
        for place in range(start, ends[group]):
            _add(target[place], source[place, first:end], ratios[group, first:end], (0, first), sign)
        start = ends[group]


@exact_part
def down_to(
    target: np.ndarray, source: np.ndarray, ratios: np.ndarray, ends: np.ndarray, column: int, end: int, sign: float
) -> None:
    """As `pass_down`, for one column j and all l > j below `end`."""
    start = 0
    for group in range(ends.size):
        own = ratios[group, column]
        for place in range(start, ends[group]):
            value, values = target[place, column], source[place]
            for later in range(column + 1, end):
                value += sign * own[later] * values[later]
            target[place, column] = value
        start = ends[group]


@exact_part
def _pass_up(rows: np.ndarray, ratios: np.ndarray, ends: np.ndarray, block: tuple[int, int]) -> None:
    """Subtract `L[l, j] rows[:, j]` from each `rows[:, l]`, for all j < l of which j is in the range `block`."""
    start, less = 0, np.float32(-1)
    for group in range(ends.size):
        factors = ratios[group, block[0] : block[1]]
        for place in range(start, ends[group]):
            own = rows[place]
            for column in range(block[0], block[1]):
                for later in range(column + 1, block[1]):
                    own[later] -= factors[column - block[0], later] * own[column]
            _add(own, own[block[0] : block[1]], factors, (block[1], own.size), less)
        start = ends[group]


@kernel("void(f4[:,:,::1], f4[:,::1], i4[::1], f4[:,::1])", exact=True, nogil=True)
def solve(ratios: np.ndarray, pivots: np.ndarray, ends: np.ndarray, columns: np.ndarray) -> None:
    """Multiply each place of `columns` [in, places] by the inverse of its group's factorised Hessian, in place."""
    size, less = len(columns), np.float32(-1)
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
        for column in range(end - 1, first - 1, -1):
            down_to(rows, rows, ratios, ends, column, end, less)
        pass_down(rows, rows, ratios, ends, (first, end), less)
    transpose(rows, columns)


@kernel("void(f4[:,:,::1], i4[::1], f4[:,::1], f4[:,::1])", exact=True, nogil=True)
def weigh(ratios: np.ndarray, ends: np.ndarray, columns: np.ndarray, weighed: np.ndarray) -> None:
    """Write L^T times each place of `columns` [in, places] to `weighed`, L being its group's factor."""
    rows = transposed(columns)
    sums = rows.copy()
    for first in range(0, len(columns), BLOCK):
        end = min(first + BLOCK, len(columns))
        for column in range(first, end):
            down_to(sums, rows, ratios, ends, column, end, np.float32(1))
        pass_down(sums, rows, ratios, ends, (first, end), np.float32(1))
    transpose(sums, weighed)
