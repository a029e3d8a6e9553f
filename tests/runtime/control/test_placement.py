"""Placements: hot experts come even where every step uses all of a layer, behind the decoding or
before it."""

import numpy as np
import pytest

from artifacts.shape import Shape
from artifacts.traces.trace import DECODE, PREFILL
from runtime.control.build import build_controller
from runtime.control.cache import RESIDENT
from runtime.control.controller import Controller
from runtime.control.plan import Plan
from runtime.policies import build
from runtime.policies.base import Artefacts, Step
from runtime.policies.presets import Scope
from tests.runtime.policies.contract import PLAIN

SHAPE = Shape(num_layers=2, num_experts=8, top_k=2, expert_nbytes=160)
HOT = [[0, 3, 5, 6], [1, 2, 4, 7]]  # by layer, the experts that the prompt prefers
EVERY = np.array([[row % 8, (row + 1) % 8] for row in range(16)])  # 16 tokens that use all eight


def controller(residency: str, *, miss: str = "cold", window: int = 160) -> Controller:
    policies = build(PLAIN | {"miss": miss, "residency": residency})
    return build_controller(
        policies, SHAPE, num_slots=8, scope=Scope.LAYER, window=window, artefacts=Artefacts()
    )


def taken(owner: Controller, phase: int, selected: list[np.ndarray]) -> list[Plan]:
    """The plans of one pass, of `selected` [T, K] by layer; the state is valid after each step."""
    owner.begin_pass(len(selected[0]))
    plans = []
    for layer, experts in enumerate(selected):
        weights = np.full(experts.shape, 0.5, np.float32)
        plans.append(owner.step(Step(owner.now.pass_index, phase, layer, experts, weights)))
        owner.validate()
    return plans


def prompted(owner: Controller) -> Controller:
    """The controller after a prompt that uses every expert, and the hot ones twice as often."""
    prompt = [np.concatenate([EVERY, np.array(hot * 4).reshape(-1, 2)]) for hot in HOT]
    taken(owner, PREFILL, prompt)
    return owner


def there(owner: Controller) -> list[list[int]]:
    """The resident experts of each layer."""
    return [
        np.flatnonzero(owner.cache.layer_states(layer) == RESIDENT).tolist() for layer in range(2)
    ]


def test_sixteen_requests_that_use_every_expert_are_placed_within_a_few_steps() -> None:
    """What the step uses is pinned until its end; it leaves then, and its slot is filled from the
    next step on, here by one expert a step."""
    owner = prompted(controller("hot"))
    assert there(owner) != HOT
    for _ in range(6):
        taken(owner, DECODE, [EVERY, EVERY])
    assert there(owner) == HOT
    totals = owner.counters.totals()
    assert totals["prefetches"] <= 8 and totals["prefetch_bytes"] == 160 * totals["prefetches"]
    for _ in range(3):
        taken(owner, DECODE, [EVERY, EVERY])
    assert there(owner) == HOT and owner.counters.totals()["prefetches"] == totals["prefetches"], (
        "placed once"
    )


def test_a_migration_before_decoding_is_there_for_the_first_step() -> None:
    owner = prompted(controller("hot:migrate=before"))
    absent = [sorted(set(hot) - set(held)) for hot, held in zip(HOT, there(owner), strict=True)]
    plans = taken(owner, DECODE, [EVERY, EVERY])
    assert there(owner) == HOT
    for plan, hot, sent in zip(plans, HOT, absent, strict=True):
        assert sorted(place.key % 8 for place in plan.placed) == sent and not plan.prefetches
        assert sorted(place.key % 8 for place in plan.near) == sorted(set(range(8)) - set(hot))
        assert sorted(place.key % 8 for place in plan.waves[0].resident) == hot
    assert [plan.placed for plan in taken(owner, DECODE, [EVERY, EVERY])] == [(), ()]


@pytest.mark.parametrize("residency", ["hot", "hot:migrate=before"])
def test_demand_loads_and_a_placement_share_the_slots(residency: str) -> None:
    """Where what is absent is fetched, a step of all experts runs in two waves whatever was
    placed."""
    owner = prompted(controller(residency, miss="fetch", window=10_000))
    for _ in range(4):
        for plan in taken(owner, DECODE, [EVERY, EVERY]):
            assert len(plan.waves) >= 2
            assert {place.slot for place in plan.placed}.isdisjoint(
                load.slot for load in plan.waves[0].loads
            )
