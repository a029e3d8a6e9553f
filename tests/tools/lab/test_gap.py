"""The rules of moe-cache-eval: an example by hand, Belady's place, and why their predictor loses."""

import dataclasses

import numpy as np
import pytest

from artifacts.shape import Shape
from artifacts.traces.synthetic import generate, parse_dials
from artifacts.traces.trace import DECODE, Trace
from runtime.policies.eviction.belady import Belady
from runtime.policies.eviction.horizon import Horizon
from runtime.policies.eviction.lru import Lru
from tools.lab.gap import Lfru, event_atomic, fitted, halves, together

SMALL = Shape(num_layers=2, num_experts=12, top_k=2, expert_nbytes=1)


def by_hand(*passes: list[int]) -> Trace:
    """A trace of one layer, an expert a token; a pass is a list of tokens."""
    rows = [(number, expert) for number, one in enumerate(passes) for expert in one]
    number, expert = np.array(rows).T
    size = len(rows)
    return Trace(
        request=np.zeros(size, np.int32),
        pass_=number.astype(np.int32),
        phase=np.full(size, DECODE, np.uint8),
        layer=np.zeros(size, np.int32),
        token=np.arange(size, dtype=np.int32),
        experts=expert[:, None].astype(np.uint16),
        weights=np.ones((size, 1), np.float32),
    )


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(
        parse_dials("skew=1,locality=0.5,tokens=240,prompt=0,requests=6"), SMALL, detailed=False
    )


def test_a_step_is_classified_before_anything_leaves_and_may_keep_none_of_its_own() -> None:
    """One slot. 0 and 1 miss together; lru keeps 1, of equals the higher id, and misses 0 and 1
    again. Belady keeps 0. The third step loads 2, which comes no more: Belady declines it, unless
    it is forced."""
    one = Shape(num_layers=1, num_experts=3, top_k=1, expert_nbytes=1)
    for policy, is_forced, expected in (
        (Lru(), False, [2, 1, 1, 1]),
        (Belady(), False, [2, 0, 1, 0]),
        (Belady(), True, [2, 0, 1, 1]),
    ):
        trace = by_hand([0, 1], [0], [2], [0])
        cell, _ = event_atomic(trace, one, policy, share=1 / 3, is_forced=is_forced)
        assert (cell.requests - cell.hits).tolist() == expected


def test_belady_misses_least_and_an_expectation_that_is_never_renewed_most(trace: Trace) -> None:
    learnt, counted = halves(trace)
    stale, anew = (fitted(learnt, SMALL, anew=anew) for anew in (False, True))
    policies = {"belady": Belady(), "lru": Lru(), "lfru": Lfru(), "horizon": Horizon()}
    found = {}
    for name, policy in (policies | {"stale": stale, "anew": anew}).items():
        cell, overdue = event_atomic(counted, SMALL, policy)
        found[name] = int(cell.hits.sum())
        assert (overdue > 0.2) == (name == "stale"), name
    forced, _ = event_atomic(counted, SMALL, Belady(), is_forced=True)
    assert max(found, key=found.get) == "belady" and found["belady"] >= forced.hits.sum()
    assert min(found, key=found.get) == "stale"


def test_requests_put_together_keep_their_tokens(trace: Trace) -> None:
    merged = together(trace, 3)
    assert len(np.unique(merged.pass_)) == 80  # 6 requests of 40 tokens, 3 at a time
    for name in (field.name for field in dataclasses.fields(trace)):
        before, after = getattr(trace, name), getattr(merged, name)
        if name in ("request", "token", "layer", "experts"):
            assert np.array_equal(np.sort(before, axis=0), np.sort(after, axis=0)), name
