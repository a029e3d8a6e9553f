"""The best path through a trellis for a column of weights, and the loop over columns that passes errors on. Importing
this module imports numba.

Rows are visited from the last to the first: a window's own bits are its lowest, so that the state before (r + 1) is
`state >> k` with k new bits on top, and the 2^k states that may follow lie side by side. Float32 in one order, without
fused operations: the same codes on every machine.
"""

import numpy as np

from artifacts.common.numba_loops import exact_part, kernel
from artifacts.common.transposition import transpose
from artifacts.quantisation.trellis_metric import BLOCK, down_to, pass_down, transposed
from artifacts.quantisation.trellis_steps import STEPS

_FAR = np.float32(1e30)


_STAY, _ONE, _TWO, _THREE, _FOUR = STEPS


@exact_part
def _walk(
    x: np.ndarray,
    prices: np.ndarray,
    half_bits: int,
    first: int,
    values: np.ndarray,
    end: int,
    path: np.ndarray,
    costs: np.ndarray,
    choices: np.ndarray,
) -> None:
    """Write the path of the rows from `first` on, as many as `path` has, round the circle; with `end` the state at both
    ends, or -1. x, prices [rows]; values [2, states]; costs [2, states]; choices [rows, states]."""
    rows, now = x.size, 0
    costs[0] = np.float32(0) if end < 0 else _FAR
    if end >= 0:
        costs[0, end] = np.float32(0)
    for place in range(path.size - 1, -1, -1):
        row = (first + place) % rows
        bits = (half_bits * (place + 1)) // 2 - (half_bits * place) // 2
        before, after, choice = costs[now].ctypes.data, costs[1 - now].ctypes.data, choices[place].ctypes.data
        own = before, after, choice, values[place & 1].ctypes.data, x[row], prices[row], costs.shape[1]
        if bits == 0:
            _STAY(*own)
        elif bits == 1:
            _ONE(*own)
        elif bits == 2:
            _TWO(*own)
        elif bits == 3:
            _THREE(*own)
        else:
            _FOUR(*own)
        now = 1 - now
    _trace(half_bits, end if end >= 0 else np.argmin(costs[now]), path, costs.shape[1], choices)


@exact_part
def _trace(half_bits: int, state: int, path: np.ndarray, num_states: int, choices: np.ndarray) -> None:
    """Follow the choices from the first row's state on."""
    for place in range(path.size):
        path[place] = state
        bits = (half_bits * (place + 1)) // 2 - (half_bits * place) // 2
        if bits:
            state = (state >> bits) | (np.int64(choices[place, state >> bits]) * (num_states >> bits))


@exact_part
def _circle(
    x: np.ndarray,
    prices: np.ndarray,
    half_bits: int,
    values: np.ndarray,
    path: np.ndarray,
    costs: np.ndarray,
    choices: np.ndarray,
) -> None:
    """Write a path that ends where it began: its first state is that of the best path through the rows about it."""
    around = min(32 // half_bits + 16, x.size // 2) & ~1
    _walk(x, prices, half_bits, x.size - around, values, -1, path[: 2 * around], costs, choices)
    start = path[around]
    _walk(x, prices, half_bits, 0, values, start, path, costs, choices)


@kernel(
    "void(f4[:,::1], f4[:,:,::1], f4[:,::1], i4[::1], i4[::1], f4[::1], u1[::1], f4[:,:,::1], u2[:,::1], f4[:,::1], "
    "f4[::1])",
    exact=True,
    nogil=True,
)
def code_columns(
    moved: np.ndarray,
    ratios: np.ndarray,
    pivots: np.ndarray,
    order: np.ndarray,
    ends: np.ndarray,
    deviations: np.ndarray,
    half_bits: np.ndarray,
    values: np.ndarray,
    paths: np.ndarray,
    errors: np.ndarray,
    energies: np.ndarray,
) -> None:
    """Code each column of `moved` [in, places] in its `half_bits` [in], from the last to the first, moved so as to undo
    the errors of those before. Writes states to `paths` [in, rows rounded up], columns less their values to `errors`
    [in, places], and mean squares of moved columns to `energies` [places]; leaves in `moved` L^T times the errors.

    Place p is row `order[p]`; `ends` [G] are the ends of groups of places. `ratios` [G, in, in] and `pivots` [G, in]
    are those of `factorise`; `values` [9, 2, states], by half bits and row parity, times `deviations` [places] of rows.
    """
    (columns, rows), num_states = paths.shape, values.shape[2]
    costs, choices = np.empty((2, num_states), np.float32), np.empty((rows, num_states), np.uint8)
    path, x, prices = np.empty(rows, np.int64), np.zeros(rows, np.float32), np.zeros(rows, np.float32)
    aims, left, energies[:] = transposed(moved), transposed(moved), np.float32(0)
    for end in range(columns, 0, -BLOCK):
        first = max(end - BLOCK, 0)
        for column in range(end - 1, first - 1, -1):
            down_to(aims, left, ratios, ends, column, end, np.float32(1))
            _price(aims[:, column], pivots[:, column], order, ends, deviations, x, prices)
            half = half_bits[column]
            _circle(x, prices, half, values[half], path, costs, choices)
            paths[column] = path
            for place, row in enumerate(order):
                energies[place] += aims[place, column] * aims[place, column] / np.float32(columns)
                value = deviations[place] * values[half, row & 1, path[row]]
                left[place, column] -= value
                aims[place, column] -= value
        pass_down(aims, left, ratios, ends, (first, end), np.float32(1))
    transpose(aims, moved)
    transpose(left, errors)


@exact_part
def _price(
    moved: np.ndarray,
    pivots: np.ndarray,
    order: np.ndarray,
    ends: np.ndarray,
    deviations: np.ndarray,
    x: np.ndarray,
    prices: np.ndarray,
) -> None:
    """Write a column in the order of rows, in units of their deviations, and what the square of an error costs."""
    start = 0
    for group in range(ends.size):
        for place in range(start, ends[group]):
            x[order[place]] = moved[place] / deviations[place]
            prices[order[place]] = pivots[group] * (deviations[place] * deviations[place])
        start = ends[group]
    _level(prices)


@exact_part
def _level(prices: np.ndarray) -> None:
    """Scale prices to a mean of 1, so that sums of costs stay in the range of float32."""
    mean = np.float32(0)
    for price in prices:
        mean += price
    mean /= np.float32(prices.size)
    for row in range(prices.size):
        prices[row] = prices[row] / mean if mean > 0 else np.float32(1)
