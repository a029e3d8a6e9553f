"""Costs that a run measures when it opens: as it will compute, by graphs where tokens are graphs."""

import json
import math

import pytest

from artifacts.hardware.costs import Costs, Work
from runtime import devices
from runtime.model.open import MoeModel, open_model
from runtime.session import run_costs
from runtime.session.run_costs import (
    DEVICE_LAYER_S,
    HOST_AHEAD_S,
    HOST_LAYER_S,
    by_device,
    road_costs,
)
from runtime.session.settings import Settings
from tests.conftest import Checkpoint
from tests.helpers.triton_process import interpret, needs_triton

pytestmark = pytest.mark.slow
COSTS = Costs(
    expert=Work(1e-3),
    load_s=2e-3,
    load_latency_s=0.0,
    near=Work(0.0),
    rest=Work(1e-3),
    head=Work(0.0),
)
TIMED = """
import json, sys
import pytest, torch
from runtime.kernels.gpu.experts import gated
from runtime.model.open import open_model
from runtime.session import probe
from tests.helpers import recorded_graphs
from tools.gpu.faked import counted_gpu
gated._ROWS, gated._COLUMNS = 32, 64
recorded_graphs.install(pytest.MonkeyPatch())
counted_gpu.install()
opened = open_model(sys.argv[1])
counts = recorded_graphs.counts
found = []
def count(work):
    counts.clear()
    assert work() > 0
    found.append([counts["graphs"], counts["launches"]])
count(lambda: probe.rest_seconds(opened, is_fused=True))
count(lambda: probe.rest_seconds(opened))
count(lambda: probe.expert_seconds(opened, is_fused=True))
opened.model.register_forward_hook(lambda model, given, output: [output.logits.max().item(), None][1])
count(lambda: probe.rest_seconds(opened, is_fused=True))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def opened(checkpoint: Checkpoint) -> MoeModel:
    return open_model(str(checkpoint("olmoe")))


@needs_triton
def test_what_decoded_tokens_replay_is_timed_by_replays(checkpoint: Checkpoint) -> None:
    [said] = interpret(TIMED, str(checkpoint("olmoe")))
    rest, launched, experts, refused = json.loads(said)
    assert rest == [10, 0] and launched == [0, 0]
    graphs, launches = experts
    assert graphs == 110 and launches <= 3, "once before the capture; a token's experts together"
    assert refused == [0, 0], "a model that cannot be captured is timed as it is launched"


def test_on_a_cpu_near_experts_take_the_time_of_compute_and_are_never_read_twice_from_disk(
    opened: MoeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = road_costs(opened, Settings(link="5GB/s", near="1GB/s")).host
    nbytes = opened.shape.expert_nbytes
    assert (costs.load_s, costs.near.memory_s) == (nbytes / 5e9, nbytes / 1e9)
    assert costs.near_host == costs.expert
    cached = road_costs(opened, Settings(link="disk")).host
    assert cached.host_s == cached.load_s > 0
    assert cached.near_host.memory_s >= cached.expert.memory_s + cached.host_s
    monkeypatch.setattr(run_costs, "host_memory", lambda: (0, 0))
    cold = road_costs(opened, Settings(link="disk")).host
    assert cold.host_s == 0 < cold.load_s and cold.near_host.memory_s == math.inf


def test_where_tokens_are_graphs_a_layer_costs_more_if_the_host_decides(
    opened: MoeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_costs, "measured_costs", lambda *_, **__: COSTS)
    assert road_costs(opened, Settings(experts="fused")).host.rest == COSTS.rest
    monkeypatch.setattr(devices, "has_graphs", lambda device: True)
    roads = road_costs(opened, Settings(experts="fused"))
    assert roads.device.rest.memory_s == pytest.approx(COSTS.rest.memory_s + DEVICE_LAYER_S)
    assert "prefetch next_gate" not in roads.device.deciding
    assert roads.host.rest.memory_s == pytest.approx(COSTS.rest.memory_s + HOST_LAYER_S)
    assert roads.host.deciding["prefetch next_gate"] == HOST_AHEAD_S
    assert not roads.by_device, "there is no GPU here"


def test_candidates_that_a_device_decides() -> None:
    found = by_device(Settings(experts="auto", decide="auto"))
    assert found == {"on-demand", "on-demand:eviction=late_horizon"}
    assert not by_device(Settings(experts="exact", decide="host"))
    assert not by_device(Settings(experts="auto", devices=2))


def test_memory_and_copies_have_a_rate() -> None:
    assert run_costs._ram_rate() > 1e6
