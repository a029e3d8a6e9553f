"""Slots by layer: against every way to share them, and demand loads by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import BadUsage
from artifacts.splits.slots_by_layer import fewest_loads, loads_on_demand


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 999), st.data())
@settings(max_examples=60)
def test_no_other_way_loads_fewer(
    layers: int, experts: int, seed: int, data: st.DataObject
) -> None:
    loads = np.random.default_rng(seed).random((layers, experts + 1))
    total = data.draw(st.integers(layers, layers * experts))
    slots = fewest_loads(loads, total)
    assert slots.sum() == total and ((slots >= 1) & (slots <= experts)).all()
    ways = (
        way for way in itertools.product(range(1, experts + 1), repeat=layers) if sum(way) == total
    )
    least = min(loads[np.arange(layers), way].sum() for way in ways)
    assert loads[np.arange(layers), slots].sum() == pytest.approx(least)


def test_a_layer_that_gains_nothing_gets_one() -> None:
    flat = np.ones(5)
    falling = np.array([2.0, 1.5, 1.0, 0.5, 0.0])
    assert fewest_loads(np.stack([flat, falling]), 5).tolist() == [1, 4]
    assert fewest_loads(np.stack([flat, flat]), 8).tolist() == [4, 4]


def test_what_is_held_or_foreseen_is_not_loaded() -> None:
    """Of two experts per token one is predicted with .5, the other with .25; one slot holds half of
    what is wanted."""
    hit = np.array([[0.0, 0.5, 1.0]])
    prediction = np.array([[0.5, 0.25, 0.1]])
    cached = np.array([[[0.0, 0.4, 1.0], [0.0, 0.4, 1.0], [0.0, 0.4, 1.0]]])
    loads = loads_on_demand(hit, prediction, cached, 2)
    np.testing.assert_allclose(loads, [[2 - 0.75, 1 - 0.75 * 0.6, 0]])


@pytest.mark.parametrize("total", [1, 9])
def test_what_cannot_be_shared_is_refused(total: int) -> None:
    with pytest.raises(BadUsage, match="from 1 to 4 in each of 2 layers"):
        fewest_loads(np.ones((2, 5)), total)
