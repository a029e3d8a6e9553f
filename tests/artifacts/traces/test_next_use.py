"""The next uses in a trace: against a search through all of it, and on an example by hand."""

import numpy as np

from artifacts.shape import Shape
from artifacts.traces.next_use import NEVER, NextUse
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import DECODE, Trace
from tests import TRACE


def test_by_hand() -> None:
    """Two passes over two layers; layer 0 wants 1 0, then 1 2; layer 1 wants 0 1, then 1 0."""
    experts = np.array([[1, 0], [0, 1], [1, 2], [1, 0]], np.uint16)
    places = {
        "request": [0] * 4,
        "pass_": [0, 0, 1, 1],
        "layer": [0, 1, 0, 1],
        "token": [0, 0, 1, 1],
    }
    columns = {name: np.array(column, np.int32) for name, column in places.items()}
    trace = Trace(
        **columns,
        phase=np.full(4, DECODE, np.uint8),
        experts=experts,
        weights=np.ones(experts.shape, np.float32),
    )
    future = NextUse.of(trace, Shape(2, 3, 2, 1))
    assert future.first.tolist() == [0, 0, 2, 1, 1, NEVER]
    assert [keys.tolist() for keys in future.step_keys] == [[1, 0], [3, 4], [1, 2], [4, 3]]
    assert [steps.tolist() for steps in future.following] == [
        [2, NEVER],
        [3, 3],
        [NEVER, NEVER],
        [NEVER, NEVER],
    ]


def test_against_a_search() -> None:
    trace = read_parquet(TRACE)
    shape = Shape(8, 32, 4, 1)
    trace = trace.take(np.flatnonzero(trace.request < 2))
    future = NextUse.of(trace, shape)
    sets = [set(keys.tolist()) for keys in future.step_keys]
    assert len(sets) == len(list(trace.steps()))
    for number, (keys, following) in enumerate(
        zip(future.step_keys, future.following, strict=True)
    ):
        for key, step in zip(keys.tolist(), following.tolist(), strict=True):
            assert step == next(
                (later for later in range(number + 1, len(sets)) if key in sets[later]), NEVER
            )
    for key in range(shape.num_keys):
        assert future.first[key] == next(
            (number for number, keys in enumerate(sets) if key in keys), NEVER
        )
