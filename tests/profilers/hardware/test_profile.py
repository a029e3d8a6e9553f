"""Profiles of a machine with small models: the measured parts are complete; their values are not
judged."""

import math
from pathlib import Path

import pytest
import torch

from artifacts.common.host_memory import num_cores
from artifacts.errors import BadUsage
from artifacts.hardware.profile import COLD
from profilers.hardware.load_times import TimingEffort
from profilers.hardware.profile import measure
from profilers.hardware.this_machine import LocalMachine
from runtime.model.open import open_model
from runtime.session.link_choice import link_name
from tests.conftest import Checkpoint
from tests.helpers.families import FAMILIES
from tools.gpu.checks.made_replicas import made

SHORT = TimingEffort(lengths=(4, 300), turns=3)  # of 256 positions


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_measured(family: str, checkpoint: Checkpoint) -> None:
    folder = checkpoint(family)
    opened = open_model(str(folder))
    profile = measure(opened, folder, effort=SHORT)
    lengths = [one.tokens for one in profile.compute]
    assert lengths == ([1, 4] if opened.config.max_position_embeddings == 256 else [1, 4, 300])
    assert all(
        one.attention.median > 0 and one.head.median > 0 and one.expert.median > 0
        for one in profile.compute
    )
    assert profile.load().link == "disk" and None not in (profile.load().miss, profile.load().host)
    assert profile.load().host.median <= profile.load().miss.median, "the rest is waiting"
    assert {"disk", "ram"} <= {load.link for load in profile.loads} <= {"disk", COLD, "ram"}
    assert all(load.gbps > 0 and load.seconds.samples == 3 for load in profile.loads)
    assert [(near.bits, near.tokens) for near in profile.near] == [(16, 1), (16, 16)]
    assert opened.model.config._experts_implementation == "eager"  # the model is restored
    assert not any(hasattr(layer.experts, "moectl_forward") for layer in opened.layers)


def test_replicas_are_measured_near_memory(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("olmoe")
    opened = open_model(str(folder))
    profile = measure(
        opened, folder, replicas=made(opened, tmp_path), effort=TimingEffort(lengths=(), turns=2)
    )
    assert [one.tokens for one in profile.compute] == [1]
    assert {(near.bits, near.tokens) for near in profile.near} == {
        (b, t) for b in (16, 1, 2, 3, 4, 8) for t in (1, 16)
    }


def test_a_rate_is_emulated(checkpoint: Checkpoint) -> None:
    folder = checkpoint("olmoe")
    profile = measure(
        open_model(str(folder)), folder, link="20MB/s", effort=TimingEffort(lengths=(), turns=2)
    )
    emulated = profile.load()
    assert emulated.link == profile.conditions["link"] == "20MB/s"
    # the emulated rate is a lower bound
    assert emulated.seconds.median >= profile.conditions["expert_bytes"] / 20e6
    assert emulated.miss is not None
    assert math.isfinite(emulated.latency.median)  # a fit, which other work on the machine affects


def test_progress_ends_with_everything(checkpoint: Checkpoint) -> None:
    folder = checkpoint("mixtral")
    heard = []
    effort = TimingEffort(lengths=(2,), turns=2)
    measure(
        open_model(str(folder)),
        folder,
        effort=effort,
        progress=lambda done, total: heard.append((done, total)),
    )
    assert heard == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_links_by_name(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    assert [link_name(opened, name) for name in ("auto", "disk", "5GB/s")] == [
        "disk",
        "disk",
        "5GB/s",
    ]
    with pytest.raises(BadUsage, match="rate 'fast' is not understood"):
        link_name(opened, "fast")
    with pytest.raises(BadUsage, match="--link cuda needs the model on a CUDA device"):
        link_name(opened, "cuda")


def test_this_machine() -> None:
    here = LocalMachine.look(torch.device("cpu"))
    assert here.processor and here.cores == num_cores() >= 1
    assert 0 < here.available_nbytes <= here.memory_nbytes
    assert here.threads == torch.get_num_threads()
    assert here.gpu is None and here.gpu_nbytes == 0
