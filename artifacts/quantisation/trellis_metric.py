"""The cost of errors for groups of rows, each group with a Hessian of its own: factors, solutions and least squares.
Importing this module imports numba.

Matrices are [in, places], places by group, as `trellis_search.code_columns` has them. Float32 in one order, without
fused operations, so that codes are the same on every machine.
"""

import numpy as np

from artifacts.common.numba_loops import kernel


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


@kernel("void(f4[:,:,::1], f4[:,::1], i4[::1], f4[:,::1])", exact=True, nogil=True)
def solve(ratios: np.ndarray, pivots: np.ndarray, ends: np.ndarray, columns: np.ndarray) -> None:
    """Multiply each place of `columns` [in, places] by the inverse of its group's factorised Hessian, in place."""
    size, start = len(columns), 0
    for group in range(ends.size):
        for column in range(size):
            for later in range(column + 1, size):
                ratio = ratios[group, column, later]
                for place in range(start, ends[group]):
                    columns[later, place] -= ratio * columns[column, place]
        for column in range(size - 1, -1, -1):
            for place in range(start, ends[group]):
                columns[column, place] /= pivots[group, column]
            for later in range(column + 1, size):
                ratio = ratios[group, column, later]
                for place in range(start, ends[group]):
                    columns[column, place] -= ratio * columns[later, place]
        start = ends[group]


@kernel("void(f4[:,:,::1], i4[::1], f4[:,::1], f4[:,::1], f8[:,::1])", exact=True, nogil=True)
def products(hessians: np.ndarray, ends: np.ndarray, values: np.ndarray, weights: np.ndarray, sums: np.ndarray) -> None:
    """Write to `sums` [2, places] the products `v H w` and `v H v` of each place's values and weights [in, places]."""
    row, start = np.empty(values.shape[1], np.float32), 0
    sums[:] = 0
    for group in range(ends.size):
        for first in range(len(values)):
            row[start : ends[group]] = np.float32(0)
            for second in range(len(values)):
                entry = hessians[group, first, second]
                for place in range(start, ends[group]):
                    row[place] += entry * values[second, place]
            for place in range(start, ends[group]):
                sums[0, place] += np.float64(row[place]) * weights[first, place]
                sums[1, place] += np.float64(row[place]) * values[first, place]
        start = ends[group]
