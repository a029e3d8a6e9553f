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
def _add(target: np.ndarray, factors: np.ndarray, rows: np.ndarray, sign: float) -> None:
    """Add `sign * factors[k] rows[k]` to `target` [n], for one k after the other; factors [K], rows [K, n]."""
    done = 0
    while done + _TOGETHER <= factors.size:
        a, b, c, d = factors[done], factors[done + 1], factors[done + 2], factors[done + 3]
        e, f, g, h = factors[done + 4], factors[done + 5], factors[done + 6], factors[done + 7]
        a, b, c, d, e, f, g, h = sign * a, sign * b, sign * c, sign * d, sign * e, sign * f, sign * g, sign * h
        own = rows[done : done + _TOGETHER]
        for place in range(target.size):
            value = target[place] + a * own[0, place]
            value += b * own[1, place]
            value += c * own[2, place]
            value += d * own[3, place]
            value += e * own[4, place]
            value += f * own[5, place]
            value += g * own[6, place]
            target[place] = value + h * own[7, place]
        done += _TOGETHER
    for k in range(done, factors.size):
        factor, own = sign * factors[k], rows[k]
        for place in range(target.size):
            target[place] += factor * own[place]


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
                _add(mine[first:], ratios[:before, column], columns[:before, first:], less)
                pivot = max(mine[column] + ridge, ridge)
                pivots[group, column] = pivot
                for row in range(column + 1, size):
                    ratio[row] = mine[row] / pivot
                    matrix[column, row] = ratio[row]
            for row in range(end, size):
                begin = row // BLOCK * BLOCK  # whole vectors; what is left of the diagonal is written anew
                _add(matrix[row, begin:], ratios[: end - first, row], columns[: end - first, begin:], less)
        for row in range(size):
            for column in range(row):
                matrix[row, column] = matrix[column, row]


@exact_part
def pass_down(
    target: np.ndarray,
    source: np.ndarray,
    ratios: np.ndarray,
    ends: np.ndarray,
    num_columns: int,
    block: tuple[int, int],
    sign: float,
) -> None:
    """Add `sign * L[l, j] source[:, l]` to each `target[:, j]`, for j below `num_columns` and all l > j in the range
    `block`; target, source [places, in]."""
    start = 0
    for group in range(ends.size):
        rows = ratios[group, block[0] : block[1]]
        below = min(num_columns, block[0])
        for place in range(start, ends[group]):
            values = source[place, block[0] : block[1]]
            _add(target[place, :below], values, rows[:, :below], sign)
            for column in range(below, num_columns):
                for later in range(column + 1, block[1]):
                    target[place, column] += sign * ratios[group, column, later] * source[place, later]
        start = ends[group]


@exact_part
def down_to(
    target: np.ndarray, source: np.ndarray, ratios: np.ndarray, ends: np.ndarray, column: int, end: int, sign: float
) -> None:
    """As `pass_down`, for one column and all l > j below `end`."""
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
                _add(
                    own[column + 1 : block[1]],
                    own[column : column + 1],
                    factors[column - block[0] :, column + 1 : block[1]],
                    less,
                )
            _add(own[block[1] :], own[block[0] : block[1]], factors[:, block[1] :], less)
        start = ends[group]


@kernel("void(f4[:,:,::1], f4[:,::1], i4[::1], f4[:,::1])", exact=True, nogil=True)
def solve(ratios: np.ndarray, pivots: np.ndarray, ends: np.ndarray, columns: np.ndarray) -> None:
    """Multiply each place of `columns` [in, places] by the inverse of its group's factorised Hessian, in place."""
    size, less = len(columns), np.float32(-1)
    rows = np.empty(columns.shape[::-1], np.float32)
    transpose(columns, rows)
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
        pass_down(rows, rows, ratios, ends, first, (first, end), less)
    transpose(rows, columns)


@kernel("void(f4[:,:,::1], i4[::1], f4[:,::1], f4[:,::1])", exact=True, nogil=True)
def weigh(ratios: np.ndarray, ends: np.ndarray, columns: np.ndarray, weighed: np.ndarray) -> None:
    """Write L^T times each place of `columns` [in, places] to `weighed`, L being its group's factor."""
    rows = np.empty(columns.shape[::-1], np.float32)
    transpose(columns, rows)
    sums = rows.copy()
    for first in range(0, len(columns), BLOCK):
        end = min(first + BLOCK, len(columns))
        pass_down(sums, rows, ratios, ends, end, (first, end), np.float32(1))
    transpose(sums, weighed)
