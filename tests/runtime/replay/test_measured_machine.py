"""Costs from a hardware profile: a step takes as long on virtual time as it did when measured."""

from dataclasses import replace

import numpy as np
import pytest

from artifacts.errors import BadInput
from artifacts.hardware.costs import Work
from artifacts.hardware.profile import EACH_LOAD
from artifacts.shape import Shape
from runtime.control.plan import Place, Plan, Wave
from runtime.replay.measured_machine import costs_of, machine_of
from runtime.replay.virtual_time import ReplayTiming
from tests.helpers.measured import made

SHAPE = Shape(num_layers=2, num_experts=4, top_k=2, expert_nbytes=100)
BOTH = (Place(0, 0, 16), Place(1, 1, 16))
ATTENTION = 10
MOE = 12
HEAD = 3
HOST = 9


def step_seconds(wave: Wave) -> float:
    timing = ReplayTiming(costs_of(made(), SHAPE), SHAPE.num_experts, {16: 100})
    timing.begin_pass(1, num_decoded=1)
    timing.step(Plan(0, np.zeros((1, 2), np.int64), None, (wave,), (), (), ()))
    timing.end_pass()
    return timing.passes[0].seconds - HEAD


def test_a_step_with_all_its_experts() -> None:
    assert step_seconds(Wave(BOTH, ())) == pytest.approx(ATTENTION + MOE)


def test_a_step_with_none_of_its_experts() -> None:
    """The link loads the first expert while the engine works on the second load; both are then
    computed, the second once it has arrived, a second after the first is done."""
    assert step_seconds(Wave((), BOTH)) == pytest.approx(ATTENTION + MOE + 2 * HOST + 1)


def test_a_load_takes_latency_bytes_and_the_engines_work() -> None:
    costs = costs_of(made(), SHAPE)
    assert (costs.load_s, costs.load_latency_s, costs.host_s, costs.reads_whole) == (
        4.0,
        1.0,
        9.0,
        True,
    )
    assert not costs_of(made(), SHAPE, link="ram").reads_whole
    older = replace(
        made(), loads=tuple(replace(load, host=None, latency=None) for load in made().loads)
    )
    costs = costs_of(older, SHAPE)
    assert (costs.load_s, costs.load_latency_s, costs.host_s) == (
        5.0,
        0.0,
        9.0,
    )  # host: the miss less its load


def test_experts_faster_together_than_alone() -> None:
    """One expert never costs more than its layer did."""
    costs = costs_of(made(), Shape(num_layers=2, num_experts=4, top_k=4, expert_nbytes=100))
    assert costs.expert.memory_s == pytest.approx(12 / 4)
    assert costs.rest.memory_s == pytest.approx(ATTENTION)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_difference_that_noise_made_nothing_of(seconds: float) -> None:
    """The time of a single expert is used instead."""
    one, *more = made().compute
    noisy = replace(made(), compute=(replace(one, moe=replace(one.moe, median=seconds)), *more))
    costs = costs_of(noisy, SHAPE)
    assert (costs.expert.memory_s, costs.rest.memory_s) == (4.0, ATTENTION)
    assert machine_of(noisy, SHAPE).fast_gbps > 0


def test_more_tokens() -> None:
    costs = costs_of(made(), SHAPE)
    assert costs.expert.seconds(16) == pytest.approx(16)
    assert costs.near_host.seconds(16) == pytest.approx(32)
    assert costs.rest.seconds(16) == pytest.approx(40 + 4)


def test_near_experts_take_time_of_the_cores_that_compute_unless_those_are_a_gpus() -> None:
    """One thread computes both, one after the other."""
    costs = costs_of(made(), SHAPE)
    assert (costs.near, costs.near_host.memory_s) == (Work(0.0), 6.0)
    on_gpu = costs_of(replace(made(), conditions=made().conditions | {"device": "cuda"}), SHAPE)
    assert (on_gpu.near, on_gpu.near_host) == (costs.near_host, Work(0.0))


def test_another_link() -> None:
    costs = costs_of(made(), SHAPE, link="ram")
    assert (costs.load_s, costs.load_latency_s, costs.host_s) == (1.0, 0.0, 0.0)
    with pytest.raises(BadInput, match="no link cuda"):
        costs_of(made(), SHAPE, link="cuda")


def test_an_emulated_link_keeps_its_rate_and_leaves_work_to_compute() -> None:
    """100 bytes at 25 a second, after half a second of latency. Of 9 s of work on each load,
    deciding takes 2 and copying 1; of the 7 s until it arrives, 2.5 are not the link's."""
    disk = made().loads[0]
    emulated = replace(disk, link="25B/s+500ms", seconds=replace(disk.seconds, median=7.0))
    told = {"deciding": {EACH_LOAD: 2.0, "prefetch next_gate": 0.5}}
    profile = replace(made(), loads=(*made().loads, emulated), conditions=made().conditions | told)
    costs = costs_of(profile, SHAPE, link=emulated.link)
    assert (costs.load_s, costs.load_latency_s, costs.wake_s) == (4.0, 0.5, 2.5)
    assert (costs.host_s, costs.copy_s, costs.demand_s) == (2.0, 1.0, 6.0)
    assert costs.deciding["prefetch next_gate"] == 0.5 and not costs.reads_whole
    untold = costs_of(replace(profile, conditions=made().conditions), SHAPE, link=emulated.link)
    assert (untold.host_s, untold.copy_s, untold.demand_s) == (0.0, 1.0, 8.0)


def test_as_bandwidths() -> None:
    machine = machine_of(made(), SHAPE)
    assert (machine.name, machine.source) == ("here", "measured: abacus")
    assert machine.link_gbps == pytest.approx(100 / 5 / 1e9)
    assert machine.near_gbps == pytest.approx(100 / 6 / 1e9)
