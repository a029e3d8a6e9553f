"""The compiled eviction order equals the sorted one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from runtime.control.cache import ABSENT, LOADING, RESIDENT
from runtime.control.ordering import first_leaving

NUM_KEYS = 24
COMPILED = first_leaving()
ranks = arrays(np.float64, NUM_KEYS, elements=st.sampled_from([-1.0, 0.0, 0.5, 3.0, np.inf]))
older = arrays(np.int64, NUM_KEYS, elements=st.integers(0, 3))
states = arrays(np.uint8, NUM_KEYS, elements=st.sampled_from([ABSENT, LOADING, RESIDENT, RESIDENT]))
pins = arrays(bool, NUM_KEYS)


@given(
    ranks,
    older,
    states,
    pins,
    st.integers(0, NUM_KEYS),
    st.integers(0, NUM_KEYS),
    st.integers(1, 9),
)
def test_the_compiled_order_is_the_sorted_one(
    ranks: np.ndarray,
    older: np.ndarray,
    states: np.ndarray,
    pins: np.ndarray,
    start: int,
    length: int,
    room: int,
) -> None:
    stop = min(NUM_KEYS, start + length)
    may_leave = [key for key in range(start, stop) if states[key] == RESIDENT and not pins[key]]
    expected = sorted(may_leave, key=lambda key: (ranks[key], older[key], key))[:room]
    found = np.full(room, -1, np.int64)
    count = COMPILED(ranks, older, states, pins, start, stop, found)
    assert found[:count].tolist() == expected
