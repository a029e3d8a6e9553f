"""A model's costs as a live run has them: in a machine's proportions, at a given rate, from a
stored profile."""

from pathlib import Path

import pytest

from artifacts.hardware.machines import machine
from artifacts.hardware.profile import Compute, HardwareProfile, Load, NearCompute, Spread
from profilers.hardware.live_costs import live_costs
from runtime.model.open import open_model
from runtime.policies.base import Artefacts
from runtime.session.probe import scaled_window
from runtime.session.session import Session, Settings
from runtime.session.settings import FUSED
from tests.conftest import Checkpoint

pytestmark = pytest.mark.slow


def spread(seconds: float) -> Spread:
    return Spread(seconds, 0.0, 2)


PROFILE = HardwareProfile(
    compute=tuple(
        Compute(n, spread(1e-3), spread(9e-4), spread(1e-4), spread(2e-4)) for n in (1, 16)
    ),
    loads=(Load("disk", spread(5e-4), 1.0, host=spread(3e-5)),),
    near=(
        NearCompute(16, 1, spread(2e-4)),
        NearCompute(16, 16, spread(4e-4)),
        NearCompute(4, 1, spread(5e-4)),
    ),
    conditions={"device": "cpu", "device_name": "a core", "link": "disk"},
)


def test_a_machines_proportions(checkpoint: Checkpoint) -> None:
    folder = checkpoint("olmoe")
    opened = open_model(str(folder))
    target = machine("rtx3090-pcie4")
    known = {"scaled_to": target.name, "link": "auto", "experts": "exact", "artefacts": Artefacts()}
    pace = live_costs(opened, Path(folder), profile=PROFILE, **known)
    costs = pace.costs
    assert "profile" in pace.source and pace.machine == target
    assert costs.near.memory_s / costs.load_s == pytest.approx(target.link_gbps / target.near_gbps)
    assert (costs.near_host.memory_s, costs.host_s, costs.shares[4]) == pytest.approx(
        (2e-4, 3e-5, 2.5)
    )
    assert costs.rest.memory_s + 2 * costs.expert.memory_s == pytest.approx(1.9e-3)
    assert (
        pace.window == scaled_window(opened.shape, target)
        and pace.settings["window"] == f"{pace.window}B"
    )
    with Session(opened, Settings(**pace.settings)) as session:
        nbytes = opened.shape.expert_nbytes
        link = session.receipt()["link"]
    assert link["bandwidth_gbps"] * 1e9 * costs.load_s == pytest.approx(nbytes, rel=1e-3)


def test_without_a_profile_or_with_fused_experts_it_is_measured(checkpoint: Checkpoint) -> None:
    folder = checkpoint("olmoe")
    opened = open_model(str(folder))
    pace = live_costs(
        opened,
        Path(folder),
        scaled_to=None,
        link="5MB/s+1ms",
        experts=FUSED,
        artefacts=Artefacts(),
        profile=PROFILE,
    )
    costs = pace.costs
    assert (
        "measured" in pace.source
        and pace.settings["link"] == "5MB/s+1ms"
        and pace.settings["experts"] == FUSED
    )
    assert (costs.load_s, costs.load_latency_s) == (opened.shape.expert_nbytes / 5e6, 1e-3)
    assert costs.rest.memory_s > 0 and costs.expert.memory_s > 0 and costs.near.memory_s == 0
    assert {
        "prefetch next_gate",
        "eviction horizon",
    } <= costs.deciding.keys() and costs.shares == {}
    assert "prefetch learned" not in costs.deciding, "which no store has fitted"
