"""`late_horizon` knows what `horizon` knew when the last pass ended."""

import numpy as np
import pytest

from artifacts.shape import Shape
from artifacts.traces.trace import DECODE
from runtime.policies.base import Artefacts, Now, Step
from runtime.policies.eviction.late_horizon import LateHorizon
from tests.runtime.policies.test_horizon import ranked

SHAPE = Shape(num_layers=2, num_experts=6, top_k=2, expert_nbytes=1)


@pytest.mark.parametrize("predicts", [False, True])
def test_it_ranks_as_horizon_did_a_pass_before(predicts: bool) -> None:
    """Predictions change nothing: a host that does not see them ranks alike."""
    rng = np.random.default_rng(3)
    late = LateHorizon()
    now = Now()
    every = np.arange(SHAPE.num_keys)
    passes = [
        [[rng.permutation(6)[:2].tolist()] for _ in range(SHAPE.num_layers)] for _ in range(12)
    ]
    late.prepare(SHAPE, Artefacts())
    for number, layers in enumerate(passes):
        now.pass_index += 1
        for layer, selected in enumerate(layers):
            now.step = now.step + 1
            now.layer = layer
            predicted = rng.random((1, 1, 6), np.float32) if predicts else None
            own = {"predicted": predicted}
            weights = np.ones((1, 2), np.float32)
            step = Step(number, DECODE, layer, np.array(selected), weights, **own)
            late.used((np.unique(selected) + layer * SHAPE.num_experts).tolist(), step, now)
            known = ranked(SHAPE, passes[:number])
            assert np.array_equal(late.order(every, now)[0], known)
            order = np.argsort(late.turns(now), axis=1)
            assert np.array_equal(order, known.reshape(2, 6).argsort(axis=1, kind="stable"))
    now.pass_index += 1  # the last pass is learned from before the next one has used anything
    assert np.array_equal(
        late.turns(now).argsort(axis=1), ranked(SHAPE, passes).reshape(2, 6).argsort(1, "stable")
    )
