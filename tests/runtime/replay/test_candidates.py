"""The preset that `auto` takes: the fastest of its candidates, whatever the machine."""

from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path

import numpy as np
import pytest

from artifacts.hardware.costs import Costs, Work
from artifacts.shape import Shape
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import Trace
from runtime.policies import build
from runtime.policies.presets import CANDIDATES, preset
from runtime.replay.candidates import RoadCosts, decoded_ms, fastest
from runtime.session.run_costs import NEAR_STEP_S, by_device, roads_of
from runtime.session.settings import Settings
from tests import ROOT

NBYTES = 12_600_000
SHAPE = Shape(num_layers=4, num_experts=32, top_k=4, expert_nbytes=NBYTES)
DECIDED = by_device(Settings(experts="auto", decide="auto"))


def gpu(*, memory: float, link: float, near: float, rest_s: float) -> RoadCosts:
    """Costs of a machine with these rates in GB/s, whose decoded tokens are graphs."""
    costs = Costs(
        expert=Work(NBYTES / memory / 1e9),
        load_s=NBYTES / link / 1e9,
        load_latency_s=0.0,
        near=Work(NBYTES / near / 1e9),
        rest=Work(rest_s),
        head=Work(0.0),
        near_step_s=NEAR_STEP_S,
    )
    return roads_of(costs, has_graphs=True, by_device=DECIDED)


def cpu(*, memory: float, load: float, shared: float, near_s: float) -> RoadCosts:
    """Costs of a machine without a GPU, of whose loads a share takes the cores."""
    load_s = NBYTES / load / 1e9
    costs = Costs(
        expert=Work(NBYTES / memory / 1e9),
        load_s=load_s * (1 - shared),
        load_latency_s=0.0,
        near=Work(0.0),
        rest=Work(0.5e-3),
        head=Work(0.0),
        host_s=load_s * shared,
        near_host=Work(near_s),
    )
    return roads_of(costs, has_graphs=False)


MACHINES = {
    "h100": gpu(memory=2300, link=54, near=89, rest_s=0.07e-3),
    "rtx4090": gpu(memory=900, link=25, near=60, rest_s=0.1e-3),
    "rtx3060": gpu(memory=330, link=12, near=40, rest_s=0.15e-3),
    "a GPU behind a slow link": gpu(memory=900, link=5, near=60, rest_s=0.1e-3),
    "cpu, from the page cache": cpu(memory=10, load=8, shared=0.5, near_s=3e-3),
    "cpu, from disk": cpu(memory=10, load=2, shared=0.0, near_s=inf),
}


@cache
def beginning(path: Path) -> Trace:
    trace = read_parquet(path)
    return trace.take(np.flatnonzero((trace.layer < SHAPE.num_layers) & (trace.request < 2)))


TRACES = {
    "gpt-oss-20b": ROOT / "moectl" / "traces" / "gpt-oss-20b.parquet",
    "the demo": ROOT / "tests" / "data" / "demo-trace.parquet",
}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.125, 0.25, 0.5])
@pytest.mark.parametrize("machine", MACHINES)
def test_on_recorded_routing_the_choice_is_within_5_percent_of_the_best(
    machine: str, share: float
) -> None:
    roads = MACHINES[machine]
    chosen, _ = fastest(roads, SHAPE, share)
    told = 0
    for name, path in TRACES.items():
        times = dict(decoded_ms(roads, beginning(path), SHAPE, share, names=CANDIDATES))
        if chosen in times:  # a trace without predictions tells nothing of prefetching
            assert times[chosen] <= 1.05 * min(times.values()), (name, chosen, times)
            told += 1
    assert told


def test_candidates_lose_nothing_and_need_nothing() -> None:
    for name in CANDIDATES:
        one = preset(name)
        assert one.is_lossless and not build(one.texts()).requires, name


def test_the_fastest_is_taken() -> None:
    costs = MACHINES["rtx4090"].host
    free = replace(costs, load_s=0.0, load_latency_s=1e-12)
    assert fastest(RoadCosts(free, free), SHAPE, 0.25)[0] == "on-demand"
    chosen, ms = fastest(MACHINES["a GPU behind a slow link"], SHAPE, 0.25)
    assert chosen == "behind"
    assert fastest(MACHINES["a GPU behind a slow link"], replace(SHAPE, num_layers=8), 0.25) == (
        chosen,
        pytest.approx(2 * ms),
    )
    only = ("on-demand", "horizon")
    assert fastest(MACHINES["cpu, from disk"], SHAPE, 0.25, names=only)[0] in only


def test_what_computes_near_is_left_out_where_nothing_is_near() -> None:
    """The trace has no predictions, so that horizon is left out, too."""
    trace = beginning(TRACES["gpt-oss-20b"])
    names = {
        machine: [name for name, _ in decoded_ms(roads, trace, SHAPE, 0.25, names=CANDIDATES)]
        for machine, roads in MACHINES.items()
    }
    assert "behind" not in names["cpu, from disk"] and "behind" in names["rtx3060"]


def test_a_device_that_decides_has_its_own_costs() -> None:
    roads = MACHINES["h100"]
    assert roads.of("on-demand") is roads.device and roads.of("behind") is roads.host


def test_one_slot_a_layer_is_a_budget() -> None:
    """A 48th of 48 experts is one, whatever the digits of the share are."""
    _, ms = fastest(MACHINES["h100"], replace(SHAPE, num_experts=48), 1 / 48, names=("on-demand",))
    assert ms > 0


def test_slots_are_where_the_scope_says() -> None:
    roads = MACHINES["rtx4090"]
    own, per_layer, common = (
        fastest(roads, SHAPE, 0.25, names=("on-demand",), scope=scope)
        for scope in (None, "layer", "global")
    )
    assert own == per_layer != common
