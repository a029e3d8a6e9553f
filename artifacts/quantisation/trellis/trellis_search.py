"""The best path through a trellis for a column of weights, and the loop over columns that passes
errors on. Importing this module imports numba.

Rows are visited from the last to the first. A window's own bits are its lowest, so the state before
(r + 1) is `state >> k` with k new bits on top, and the 2^k states that may follow lie side by side.
Costs are whole numbers, and the numbers that pass from column to column are float32 in one order,
without fused operations: the same codes on every machine.
"""

import numpy as np

from artifacts.common.lookups import HAS_LOOKUPS
from artifacts.common.numba_loops import exact_part, kernel
from artifacts.common.transposition import transpose
from artifacts.quantisation.trellis.trellis_metric import pass_down, transposed
from artifacts.quantisation.trellis.trellis_products import BLOCK
from artifacts.quantisation.trellis.trellis_steps import STEPS

_FAR = 0xFFFF
_NUM_LEVELS = 64
_UNITS = np.array([0, 60, 118, 228, 457, 865, 1600, 2700, 4383], np.float32)
"""Cost of a squared error of 1, by half bits: a usual row's costs some 32."""

_STAY, _ONE, _TWO, _THREE, _FOUR = STEPS


@exact_part
def _bits(half_bits: int, place: int) -> int:
    """Return the number of bits that are a row's own."""
    return (half_bits * (place + 1)) // 2 - (half_bits * place) // 2


@exact_part
def _most(half_bits: int, num_states: int) -> np.float32:
    """Return the largest cost of a row at which the costs of paths, less the least of them, do not
    reach the end of the numbers: paths meet within a window."""
    rows = 2
    while half_bits * (rows - 2) // 2 < np.log2(num_states):
        rows += 1
    return np.float32(_FAR // (rows + 1))


@exact_part
def _cost(
    x: float, price: float, levels: np.ndarray, largest: float, most: float, costs: np.ndarray
) -> None:
    """Write the cost of each of 64 levels for x, less the cost of the `largest` if x is beyond it:
    a cost that all have in common decides nothing, and may be more than the numbers hold."""
    beyond = max(abs(x) - largest, np.float32(0))
    least = beyond * beyond
    for index in range(_NUM_LEVELS):
        error = x - levels[index]
        cost = price * max(error * error - least, np.float32(0)) + np.float32(0.5)
        costs[index] = np.uint16(np.int32(cost if cost < most else most))


@exact_part
def _take(bits: int, given: tuple[int, ...]) -> int:
    """Take the step of a row with this many bits."""
    if bits == 0:
        return _STAY(*given)
    if bits == 1:
        return _ONE(*given)
    if bits == 2:
        return _TWO(*given)
    if bits == 3:
        return _THREE(*given)
    return _FOUR(*given)


@kernel(
    (
        "void(f4[::1], f4[::1], int64, int64, f4[:,::1], u2[::1], int64, int64[::1], u2[:,::1], "
        "u1[:,::1])"
    ),
    exact=True,
    nogil=True,
)
def walk(
    x: np.ndarray,
    prices: np.ndarray,
    half_bits: int,
    first: int,
    levels: np.ndarray,
    hashes: np.ndarray,
    end: int,
    path: np.ndarray,
    costs: np.ndarray,
    choices: np.ndarray,
) -> None:
    """Write the path of the rows from `first` on, as many as `path` has, round the circle. `end` is
    the state at both ends, or -1. x, prices [rows]; levels [2, 64], where a state has the level at
    its hash; costs [3, states]; choices [rows, *]."""
    rows = x.size
    num_states = hashes.size
    now = 0
    less = 0
    most = _most(half_bits, num_states)
    largest = levels.max()
    own = np.empty(_NUM_LEVELS, np.uint16)
    costs[0] = 0 if end < 0 else _FAR
    if end >= 0:
        costs[0, end] = 0
    table = own.ctypes.data if HAS_LOOKUPS else costs[2].ctypes.data
    for place in range(path.size - 1, -1, -1):
        row = first + place
        row -= rows if row >= rows else 0
        _cost(x[row], prices[row], levels[place & 1], largest, most, own)
        if not HAS_LOOKUPS:
            for state in range(num_states):
                costs[2, state] = own[hashes[state]]
        bits = _bits(half_bits, place)
        before = costs[now].ctypes.data
        after = costs[1 - now].ctypes.data
        choice = choices[place].ctypes.data
        given = before, after, choice, hashes.ctypes.data, table, less, num_states
        less = _take(bits, given)
        now = 1 - now
    _trace(half_bits, end if end >= 0 else np.argmin(costs[now]), path, num_states, choices)


@exact_part
def _trace(
    half_bits: int, state: int, path: np.ndarray, num_states: int, choices: np.ndarray
) -> None:
    """Follow the choices from the first row's state on."""
    for place in range(path.size):
        path[place] = state
        bits = _bits(half_bits, place)
        if bits:
            part = num_states >> bits
            way = 0
            state >>= bits
            for bit in range(bits):
                octet = np.int64(choices[place, (bit * part + state) >> 3])
                way |= ((octet >> (state & 7)) & 1) << bit
            state |= way * part


@exact_part
def _circle(
    x: np.ndarray,
    prices: np.ndarray,
    half_bits: int,
    levels: np.ndarray,
    hashes: np.ndarray,
    path: np.ndarray,
    costs: np.ndarray,
    choices: np.ndarray,
) -> None:
    """Write a path that ends where it began: its first state is taken from the best path through
    the rows about it."""
    around = min(32 // half_bits + 16, x.size // 2) & ~1
    first = x.size - around
    walk(x, prices, half_bits, first, levels, hashes, -1, path[: 2 * around], costs, choices)
    start = path[around]
    walk(x, prices, half_bits, 0, levels, hashes, start, path, costs, choices)


@kernel(
    "void(f4[:,::1], f4[:,:,::1], f4[:,::1], i4[::1], i4[::1], f4[::1], u1[::1], f4[:,:,::1], "
    "u2[::1], u2[:,::1], f4[:,::1], f4[::1])",
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
    levels: np.ndarray,
    hashes: np.ndarray,
    paths: np.ndarray,
    errors: np.ndarray,
    energies: np.ndarray,
) -> None:
    """Code each column of `moved` [in, places] in its `half_bits` [in], from the last to the first,
    moved so as to undo the errors of the columns before.

    Writes states to `paths` [in, rows rounded up], columns less their values to `errors`
    [in, places], and mean squares of moved columns to `energies` [places]. Leaves L^T times the
    errors in `moved`.

    Place p is row `order[p]`; `ends` [G] are the ends of groups of places. `ratios` [G, in, in] and
    `pivots` [G, in] come from `factorise`. A state's place in `hashes` [states] names one of
    `levels` [9, 2, 64], by half bits and row parity; the state stands for this level times its
    row's one of `deviations` [places].
    """
    columns, rows = paths.shape
    num_states = hashes.size
    num_places = order.size
    costs = np.empty((3, num_states), np.uint16)
    choices = np.empty((rows, num_states // 16), np.uint8)
    path = np.empty(rows, np.int64)
    x = np.zeros(rows, np.float32)
    prices = np.zeros(rows, np.float32)
    aims = transposed(moved)
    left = np.empty((num_places, columns), np.float32)
    energies[:] = np.float32(0)
    factors = np.empty((BLOCK, BLOCK, num_places), np.float32)
    for end in range(columns, 0, -BLOCK):
        first = max(end - BLOCK, 0)
        _begin_block(aims, ratios, ends, (first, end), errors, moved, factors)
        for column in range(end - 1, first - 1, -1):
            own = moved[column]
            half = half_bits[column]
            _add_products(
                own,
                factors[column - first, column + 1 - first : end - first],
                errors[column + 1 : end],
            )
            _price(own, pivots[:, column], order, ends, deviations, _UNITS[half], x, prices)
            _circle(x, prices, half, levels[half], hashes, path, costs, choices)
            paths[column] = path
            values = _values(path, order, deviations, levels[half], hashes)
            _leave(values, own, errors[column], energies, columns)
        transpose(errors[first:end], left[:, first:end])
        pass_down(aims, left, ratios, ends, (first, end), False)


@exact_part
def _values(
    path: np.ndarray,
    order: np.ndarray,
    deviations: np.ndarray,
    levels: np.ndarray,
    hashes: np.ndarray,
) -> np.ndarray:
    """Return the values that a column's states stand for, by place."""
    values = np.empty(order.size, np.float32)
    for place, row in enumerate(order):
        values[place] = deviations[place] * levels[row & 1, hashes[path[row]]]
    return values


@exact_part
def _leave(
    values: np.ndarray, own: np.ndarray, errors: np.ndarray, energies: np.ndarray, columns: int
) -> None:
    """Subtract a column's values from `own`, the column as moved, and from `errors`, the column as
    it was. Add the squares of the former, before that, over the number of columns to `energies`."""
    for place, value in enumerate(values):
        energies[place] += own[place] * own[place] / np.float32(columns)
        errors[place] -= value
        own[place] -= value


@exact_part
def _begin_block(
    aims: np.ndarray,
    ratios: np.ndarray,
    ends: np.ndarray,
    block: tuple[int, int],
    errors: np.ndarray,
    moved: np.ndarray,
    factors: np.ndarray,
) -> None:
    """Copy `moved` to `errors` and `aims` to `moved` for the columns in the range `block`. Write
    `L[l, j]` of each place to factors[j, l], for all l > j in the range."""
    first, end = block
    errors[first:end] = moved[first:end]
    transpose(aims[:, first:end], moved[first:end])
    start = 0
    for group in range(ends.size):
        for column in range(first, end):
            for later in range(column + 1, end):
                factors[column - first, later - first, start : ends[group]] = ratios[
                    group, column, later
                ]
        start = ends[group]


@exact_part
def _add_products(sums: np.ndarray, factors: np.ndarray, numbers: np.ndarray) -> None:
    """Add rows of numbers, each times factors of its own, one row after the other."""
    for row in range(len(factors)):
        for place in range(sums.size):
            sums[place] += factors[row, place] * numbers[row, place]


@exact_part
def _price(
    moved: np.ndarray,
    pivots: np.ndarray,
    order: np.ndarray,
    ends: np.ndarray,
    deviations: np.ndarray,
    unit: float,
    x: np.ndarray,
    prices: np.ndarray,
) -> None:
    """Write a column in the order of rows, in units of their deviations, and the cost of a squared
    error of each row."""
    start = 0
    for group in range(ends.size):
        for place in range(start, ends[group]):
            x[order[place]] = moved[place] / deviations[place]
            prices[order[place]] = pivots[group] * (deviations[place] * deviations[place])
        start = ends[group]
    _level(prices, unit)


@exact_part
def _level(prices: np.ndarray, unit: float) -> None:
    """Scale prices to a mean of `unit`."""
    mean = np.float32(0)
    for price in prices:
        mean += price
    mean /= np.float32(prices.size)
    for row in range(prices.size):
        prices[row] = unit * (prices[row] / mean) if mean > 0 else unit
