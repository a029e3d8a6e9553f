"""Costs that only an emulated machine has: near experts on the computing thread, few bits that save
less time than bytes, and the policies' own time."""

from dataclasses import replace

import numpy as np
import pytest

from artifacts.hardware.costs import Costs, Work
from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import ModelShape
from artifacts.quantisation.replicas import typical
from artifacts.shape import Shape
from artifacts.traces.synthetic import Dials, generate
from runtime.policies.base import Artefacts
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload

SHAPE = Shape(num_layers=2, num_experts=8, top_k=2, expert_nbytes=6144)
MODEL = ModelShape("small", SHAPE, hidden=32, vocabulary=100)
TRACE = generate(Dials(tokens=20, requests=1, prompt=4), SHAPE)
COSTS = Costs(
    Work(1.0), load_s=50.0, load_latency_s=0.0, near=Work(0.0), rest=Work(10.0), head=Work(0.0)
)


def ms(costs: Costs, **policies: str) -> float:
    known = Artefacts(replicas=typical(np.ones((2, 8)), expert_nbytes=6144))
    tried = Workload(TRACE, MODEL, machine("a100-pcie4"), artefacts=known, costs=costs)
    return tried.run(Setting("one", policies=policies, budget="50%")).times["tpot_ms"] / 1e3


def test_near_experts_take_time_of_the_computing_thread() -> None:
    """Two layers of two experts that are all near: nothing else is computed."""
    all_near = {"miss": "near:fill=no"}
    assert ms(COSTS, **all_near) == pytest.approx(20)
    assert ms(replace(COSTS, near_host=Work(3.0)), **all_near) == pytest.approx(20 + 4 * 3)
    assert ms(replace(COSTS, near=Work(7.0), near_host=Work(3.0)), **all_near) == pytest.approx(
        20 + 4 * 7
    )


def test_few_bits_take_the_share_that_was_measured() -> None:
    low = {"miss": "shadow", "residency": "shadow:bits=2,slots=no"}
    by_bytes = ms(COSTS, **low)
    assert 20 < by_bytes < 24
    assert ms(replace(COSTS, shares={2: 2.5}), **low) == pytest.approx(20 + 4 * 2.5)


def test_a_policys_own_work_counts_in_every_layer() -> None:
    deciding = {"prefetch frequency": 0.5, "eviction lfu": 0.25, "eviction lru": 9.0}
    plain = ms(COSTS, prefetch="frequency", eviction="lfu")
    assert ms(
        replace(COSTS, deciding=deciding), prefetch="frequency", eviction="lfu"
    ) == pytest.approx(plain + 1.5, rel=0.02)
    farther = {"prefetch": "frequency:distance=2", "eviction": "lfu"}
    as_named = ms(replace(COSTS, deciding=deciding), **farther)
    told_apart = deciding | {"prefetch frequency:distance=2": 0.75}
    assert ms(replace(COSTS, deciding=told_apart), **farther) == pytest.approx(
        as_named + 0.5, rel=0.02
    )
