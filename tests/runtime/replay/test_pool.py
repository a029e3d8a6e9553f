"""The light replay of one pool: its counts and times are the simulator's."""

from dataclasses import replace

import numpy as np
import pytest

from artifacts.hardware.costs import Costs
from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import model_shape
from artifacts.shape import Shape
from artifacts.traces.synthetic import Dials, generate
from artifacts.traces.trace import DECODE
from runtime.replay.drafting import Drafts, verified
from runtime.replay.pool import SOONEST, SlotPool, Steps
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload

MODEL = model_shape("mixtral-8x7b")
COSTS = Costs.of(MODEL, machine("rtx4090"))
NUM_KEYS = MODEL.shape.num_keys


@pytest.fixture(scope="module")
def trace():
    return generate(Dials(tokens=60, requests=3, prompt=1), MODEL.shape)


@pytest.mark.parametrize("budget", ["12.5%", "50%", "100%"])
@pytest.mark.parametrize(
    ("preset", "policies", "pool"),
    [
        ("llama.cpp", {}, SlotPool(0)),
        ("llama.cpp", {"miss": "share:near=0.8"}, SlotPool(0, near_share=0.8)),
        ("freetoken", {"miss": "fetch"}, SlotPool(0, num_classes=1)),
        ("freetoken", {}, SlotPool(0, SOONEST, num_classes=1)),
    ],
)
def test_counts_and_times_are_those_of_the_simulator(trace, preset, policies, pool, budget):
    decoded = trace.take(np.flatnonzero(trace.phase == DECODE))
    setting = Setting("", preset, policies, budget=budget)
    outcome = Workload(decoded, MODEL, machine("rtx4090")).run(setting)

    pool = replace(pool, num_slots=outcome.num_slots)
    found = Steps(trace, MODEL.shape.num_experts).through(pool, COSTS)

    names = ("requests", "misses", "near", "fetched")
    told = {name: outcome.counters[name] for name in names}
    assert dict(zip(names, found.counts.sum(axis=0).tolist(), strict=True)) == told
    passes = [each.seconds - COSTS.head.seconds(1) for each in outcome.passes]
    assert found.seconds == pytest.approx(passes, rel=1e-9)


@pytest.mark.parametrize("budget", ["12.5%", "50%"])
def test_with_drafts_its_counts_are_those_of_the_simulator(trace, budget):
    decoded = trace.take(np.flatnonzero(trace.phase == DECODE))
    drafted = verified(decoded, 3, Drafts((0.6,)))
    outcome = Workload(drafted, MODEL, machine("rtx4090")).run(
        Setting("", "llama.cpp", budget=budget)
    )

    found = Steps(drafted, MODEL.shape.num_experts).through(SlotPool(outcome.num_slots), COSTS)

    told = [outcome.counters[name] for name in ("requests", "misses", "near", "fetched")]
    assert found.counts.sum(axis=0).tolist() == told
    assert outcome.counters["accepted"] == 57 - len(outcome.passes)
    forgets = replace(drafted, rejected=None)  # what every draft wants would be a use
    others = Steps(forgets, MODEL.shape.num_experts).through(SlotPool(outcome.num_slots), COSTS)
    assert others.counts.sum(axis=0).tolist() != told


def test_without_slots_every_miss_is_computed_near_and_nothing_is_loaded(trace):
    steps = Steps(trace, MODEL.shape.num_experts)

    counts = steps.through(SlotPool(0, near_share=1.0), COSTS).counts

    assert (counts[:, :3] == 2).all()
    assert not counts[:, 3].any()


def test_layers_held_whole_never_miss_and_leave_the_pool_to_the_others(trace):
    steps = Steps(trace, MODEL.shape.num_experts)

    counts = steps.through(SlotPool(8, held=np.arange(NUM_KEYS) >= 8), COSTS).counts

    assert not counts[np.arange(len(counts)) % 32 > 0, 1].any()
    assert counts[::32, 1].sum() == 8  # the first layer's experts, once each


def test_a_full_pool_leaves_a_share_of_the_misses_to_the_near_tier(trace):
    steps = Steps(trace, MODEL.shape.num_experts)

    counts = steps.through(SlotPool(NUM_KEYS // 4, near_share=0.8), COSTS).counts

    _, misses, near, loads = counts.sum(axis=0).tolist()
    assert near + loads == misses
    after = int(np.searchsorted(counts[:, 3].cumsum(), NUM_KEYS // 4)) + 1
    assert not counts[:after, 2].any()
    assert counts[after:, 2].sum() == pytest.approx(0.8 * counts[after:, 1].sum(), abs=1)


@pytest.mark.parametrize(("name", "expected"), [("5gbps", 2), ("rtx4090", 1), ("rtx5090", 0)])
def test_the_soonest_share_follows_the_rates(trace, name, expected):
    costs = Costs.of(MODEL, machine(name))

    counts = Steps(trace, MODEL.shape.num_experts).through(SlotPool(0, SOONEST), costs).counts

    assert (counts[:, 2] == expected).all()


def test_a_pass_of_several_tokens_wants_each_expert_once():
    shape = Shape(1, 8, 2, 1)
    trace = generate(Dials(tokens=4, requests=1, prompt=1), shape)
    together = type(trace)(**{**trace.columns(), "pass_": np.zeros_like(trace.pass_)})

    steps = Steps(together, 8)

    assert steps.num_tokens.tolist() == [3]
    distinct = len(np.unique(trace.experts[trace.phase == 1]))
    assert steps.through(SlotPool(8), COSTS).counts.tolist() == [[distinct, distinct, 0, distinct]]
