"""Recall equals a count by hand, and the controls have the expected extremes."""

import numpy as np
import pytest

from artifacts.routing.predictors import RECORDED
from artifacts.shape import Shape
from artifacts.traces.next_use import NextUse
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import Trace
from runtime.policies.base import Artefacts
from runtime.policies.presets import Scope
from tests import TRACE
from tools.lab.price_prefetch import PrefetchForesight, PrefetchTier, foresight

SHAPE = Shape(num_layers=8, num_experts=32, top_k=4, expert_nbytes=160)
TIER = PrefetchTier(num_slots=64, scope=Scope.GLOBAL, eviction="least_stale", window=320)


@pytest.fixture(scope="module")
def trace() -> Trace:
    whole = read_parquet(TRACE, num_experts=32)
    return whole.take(whole.request < 2)


def found(trace: Trace, text: str, tier: PrefetchTier = TIER) -> PrefetchForesight:
    return foresight(
        trace, SHAPE, text, tier, Artefacts(next_use=NextUse.of(trace, SHAPE), predictors=RECORDED)
    )


def by_hand(trace: Trace, distance: int) -> float:
    """Recall of the routers' own predictions for decoded tokens, up to `distance` layers ahead."""
    steps = list(trace.steps())
    hits = wanted = 0
    for at, step in enumerate(steps):
        if step.phase == 0:
            continue
        before = steps[at - distance]
        rows = (
            before.predicted[-1:, distance - 1]
            if before.pass_index != step.pass_index
            else before.predicted[:, distance - 1]
        )
        named = set(np.argsort(-rows, axis=1, kind="stable")[:, :4].ravel().tolist())
        hits += len(named & set(step.experts.ravel().tolist()))
        wanted += len(set(step.experts.ravel().tolist()))
    return hits / wanted


@pytest.mark.parametrize("distance", [1, 3])
def test_recall_is_that_of_the_routers(trace: Trace, distance: int) -> None:
    seen = found(trace, f"next_gate:distance={distance}")
    assert seen.recall == pytest.approx(by_hand(trace, distance))
    assert seen.precision == pytest.approx(seen.recall), "as many are named as are wanted"


def test_the_controls_are_at_the_ends(trace: Trace) -> None:
    chance, learned, oracle = (
        found(trace, name) for name in ("random", "learned", "oracle:distance=1")
    )
    assert chance.recall == pytest.approx(4 / 32, abs=0.02) and chance.in_time < 0.3
    assert (oracle.recall, oracle.precision, oracle.wasted_bytes) == (1, 1, 0)
    assert (
        chance.hit_rate < learned.hit_rate < oracle.hit_rate and chance.recall < learned.recall < 1
    )


def test_a_narrow_link_brings_late(trace: Trace) -> None:
    narrow = PrefetchTier(TIER.num_slots, TIER.scope, TIER.eviction, window=60)
    one, two = (found(trace, f"oracle:distance={distance}", narrow) for distance in (1, 3))
    assert one.late > two.late > 0 and one.in_time + one.late <= 1
    assert found(trace, "oracle:distance=1").late == 0


def test_bytes_are_those_of_the_link(trace: Trace) -> None:
    seen = found(trace, "learned")
    assert seen.demand_bytes == 160 * seen.misses and 0 < seen.wasted_bytes < seen.prefetch_bytes
