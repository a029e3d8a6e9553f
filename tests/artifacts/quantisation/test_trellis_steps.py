"""A row's step through a trellis is what plain numpy makes of it, with tables in registers or
without."""

import numpy as np
import pytest
from numba import njit

from artifacts.quantisation.trellis.trellis_steps import PLAIN_STEPS, STEPS

BITS = 3
NUM_STATES = 512
PART = NUM_STATES >> BITS
LESS = 40
_LOOKED_UP = STEPS[BITS]
_PLAIN = PLAIN_STEPS[BITS]


@njit
def looked_up(before, after, choices, hashes, costs):
    own = (
        before.ctypes.data,
        after.ctypes.data,
        choices.ctypes.data,
        hashes.ctypes.data,
        costs.ctypes.data,
    )
    return _LOOKED_UP(*own, LESS, NUM_STATES)


@njit
def plain(before, after, choices, hashes, costs):
    own = (
        before.ctypes.data,
        after.ctypes.data,
        choices.ctypes.data,
        hashes.ctypes.data,
        costs.ctypes.data,
    )
    return _PLAIN(*own, LESS, NUM_STATES)


@pytest.mark.parametrize("step", [looked_up, plain])
def test_a_step_takes_the_cheapest_way_to_each_state(step: object) -> None:
    random = np.random.default_rng(0)
    # ties, and some below
    before = random.integers(LESS - 10, LESS + 10, NUM_STATES).astype(np.uint16)
    before[::7] = 0xFFFF
    hashes = random.integers(0, 64, NUM_STATES).astype(np.uint16)
    table = random.integers(0, 3000, 64).astype(np.uint16)
    after = np.zeros(NUM_STATES, np.uint16)
    choices = np.zeros(BITS * PART // 8, np.uint8)
    costs = table if step is looked_up and STEPS is not PLAIN_STEPS else table[hashes]
    least = step(before, after, choices, hashes, costs)
    ways = before.reshape(1 << BITS, PART).astype(np.int64)
    lowest = np.maximum(ways.min(0) - LESS, 0)
    own = np.repeat(lowest, 1 << BITS) + table[hashes]
    np.testing.assert_array_equal(after, np.minimum(own, 0xFFFF))
    bits = np.unpackbits(choices, bitorder="little").reshape(BITS, PART)
    np.testing.assert_array_equal(
        sum(plane.astype(int) << bit for bit, plane in enumerate(bits)), ways.argmin(0)
    )
    assert least == lowest.min()
