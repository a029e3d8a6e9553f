"""The cost of errors for groups of rows, each group with a Hessian of its own: factors, solutions, products. Importing
this module imports numba.

Matrices are [in, places], places by group, as `trellis_search.code_columns` has them. Float32 in one order, without
fused operations, so that codes are the same on every machine.
"""

import numpy as np

from artifacts.common.numba_loops import exact_part, kernel

BLOCK = 16
"""Columns that are passed on together: of so many, what every other column reads stays in the cache."""


@kernel("void(f4[:,:,::1], f4[:,::1], f4[::1])", exact=True, nogil=True)
def factorise(hessians: np.ndarray, pivots: np.ndarray, ridges: np.ndarray) -> None:
    """Turn Hessians [G, in, in], with `ridges` [G] added to their diagonals, into unit factors and `pivots` [G, in]:
    H = L diag(pivots) L^T, where L[l, j] is left at [g, j, l]. A pivot is at least the ridge."""
    size = hessians.shape[1]
    for group in range(hessians.shape[0]):
        matrix, ridge = hessians[group], ridges[group]
        for column in range(size):
            pivot = max(matrix[column, column] + ridge, ridge)
            pivots[group, column] = pivot
            upper = matrix[column]
            for row in range(column + 1, size):
                ratio, lower = upper[row] / pivot, matrix[row]
                for place in range(row, size):
                    lower[place] -= ratio * upper[place]
            for row in range(column + 1, size):
                upper[row] = upper[row] / pivot


@exact_part
def pass_down(
    target: np.ndarray,
    source: np.ndarray,
    ratios: np.ndarray,
    ends: np.ndarray,
    columns: tuple[int, int],
    block: tuple[int, int],
    sign: float,
) -> None:
    """Add `sign * L[l, j] source[l]` to each `target[j]`, for j in the range `columns` and all l > j in the range
    `block`."""
    for column in range(columns[0], columns[1]):
        row, start = target[column], 0
        for group in range(ends.size):
            for later in range(max(block[0], column + 1), block[1]):
                ratio, values = sign * ratios[group, column, later], source[later]
                for place in range(start, ends[group]):
                    row[place] += ratio * values[place]
            start = ends[group]


@exact_part
def _pass_up(
    columns: np.ndarray, ratios: np.ndarray, ends: np.ndarray, rows: tuple[int, int], block: tuple[int, int]
) -> None:
    """Subtract `L[l, j] columns[j]` from each `columns[l]`, for l in the range `rows` and all j < l in the range
    `block`."""
    for later in range(rows[0], rows[1]):
        row, start = columns[later], 0
        for group in range(ends.size):
            for column in range(block[0], min(block[1], later)):
                ratio, values = ratios[group, column, later], columns[column]
                for place in range(start, ends[group]):
                    row[place] -= ratio * values[place]
            start = ends[group]


@kernel("void(f4[:,:,::1], f4[:,::1], i4[::1], f4[:,::1])", exact=True, nogil=True)
def solve(ratios: np.ndarray, pivots: np.ndarray, ends: np.ndarray, columns: np.ndarray) -> None:
    """Multiply each place of `columns` [in, places] by the inverse of its group's factorised Hessian, in place."""
    size, less = len(columns), np.float32(-1)
    for first in range(0, size, BLOCK):
        end = min(first + BLOCK, size)
        _pass_up(columns, ratios, ends, (first, end), (first, end))
        _pass_up(columns, ratios, ends, (end, size), (first, end))
    for column in range(size):
        start = 0
        for group in range(ends.size):
            for place in range(start, ends[group]):
                columns[column, place] /= pivots[group, column]
            start = ends[group]
    for end in range(size, 0, -BLOCK):
        first = max(end - BLOCK, 0)
        for column in range(end - 1, first - 1, -1):
            pass_down(columns, columns, ratios, ends, (column, column + 1), (first, end), less)
        pass_down(columns, columns, ratios, ends, (0, first), (first, end), less)


@kernel("void(f4[:,:,::1], i4[::1], f4[:,::1], f4[:,::1])", exact=True, nogil=True)
def weigh(ratios: np.ndarray, ends: np.ndarray, columns: np.ndarray, weighed: np.ndarray) -> None:
    """Write L^T times each place of `columns` [in, places] to `weighed`, L being its group's factor."""
    weighed[:] = columns
    for first in range(0, len(columns), BLOCK):
        end = min(first + BLOCK, len(columns))
        pass_down(weighed, columns, ratios, ends, (0, end), (first, end), np.float32(1))
