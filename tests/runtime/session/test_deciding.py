"""Where a device cannot decide, one line says why and what to give."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.backends.cpu.cpu_backend import CpuBackend
from runtime.backends.triton.triton_backend import TritonBackend
from runtime.control.build import build_controller
from runtime.control.controller import Controller
from runtime.model.open import open_model
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.presets import Scope
from runtime.session.build import _settled, cache_on_device, whole_experts
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint

SHAPE = Shape(num_layers=2, num_experts=8, top_k=2, expert_nbytes=64)


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({"decide": "gpu"}, "host, device"),
        ({"preset": "horizon"}, "give --preset on-demand"),
        (
            {"policies": {"prefetch": "next_gate:distance=2"}},
            "and --prefetch next_gate, for the next layer",
        ),
        (
            {"policies": {"eviction": "lfu:decay=0.9"}},
            "no other policies than --eviction lfu or late_horizon",
        ),
        ({"policies": {"residency": "split:theta=0.5"}}, "give --preset on-demand"),
        ({"scope": "global"}, "give --scope layer"),
        ({"experts": "exact"}, "give --experts fused"),
        ({"devices": 2}, "leave out --devices"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(chosen: dict[str, object], told: str) -> None:
    with pytest.raises(BadUsage, match=told):
        Settings(**{"decide": "device", "experts": "fused"} | chosen)


def decided(
    decide: str = "device",
    *,
    fused: type = TritonBackend,
    device: str = "cuda",
    kind: str = "cuda",
    shape: Shape = SHAPE,
    **chosen: object,
) -> object:
    """What a session chose, as far as it is asked who decides."""
    settings = Settings(decide=decide, experts="fused", **chosen)
    return SimpleNamespace(
        settings=settings,
        fused=fused,
        opened=SimpleNamespace(
            model=SimpleNamespace(device=torch.device(device)), shape=shape, family="olmoe"
        ),
        link=SimpleNamespace(kind=kind),
        policies=build(settings.texts()),
    )


def controller_of(num_slots: int, shape: Shape = SHAPE) -> Controller:
    own = {"num_slots": num_slots, "scope": Scope.LAYER, "window": 0, "artefacts": Artefacts()}
    return build_controller(build(Settings().texts()), shape, **own)


@pytest.mark.parametrize(
    ("chosen", "num_slots", "told"),
    [
        (
            decided(fused=CpuBackend, device="cpu", kind="disk"),
            8,
            "none for olmoe on cpu.*leave it out",
        ),
        (decided(kind="disk"), 8, "give --link cuda"),
        (decided(kind="emulated"), 8, "give --link cuda"),
        (decided(), 3, "give --budget 4x"),
    ],
)
def test_machines_and_budgets_for_which_it_is_not_made_are_refused(
    chosen: object, num_slots: int, told: str
) -> None:
    with pytest.raises(BadUsage, match=told):
        cache_on_device(chosen, controller_of(num_slots))


def test_it_is_used_where_something_is_left_to_decide() -> None:
    assert np.array_equal(cache_on_device(decided(), controller_of(5)).num_slots, [3, 2])
    assert cache_on_device(decided(), controller_of(16)) is None
    assert cache_on_device(decided("host"), controller_of(5)) is None


@pytest.mark.parametrize(
    ("chosen", "num_slots", "decide"),
    [
        ({}, 5, "device"),
        ({"preset": "horizon"}, 5, "host"),
        ({}, 3, "host"),
        ({"kind": "disk"}, 8, "host"),
        ({"fused": CpuBackend, "device": "cpu"}, 8, "host"),
    ],
    ids=str,
)
def test_what_is_left_open_is_decided_where_it_can_be(
    chosen: dict[str, object], num_slots: int, decide: str
) -> None:
    choices = decided("auto", **chosen)
    choices.settings = replace(choices.settings, experts="auto")
    choices.fast = SimpleNamespace(num_slots=num_slots)
    choices.is_fused = True
    settled = _settled(choices)
    assert (settled.decide, settled.experts) == (decide, "fused")
    choices.is_fused = False
    choices.fused = None
    settled = _settled(choices)
    assert (settled.decide, settled.experts) == ("host", "exact")


AHEAD = {"policies": {"prefetch": "next_gate"}}


@pytest.mark.parametrize(
    ("chosen", "measured", "window"),
    [({}, 200, 192), ({}, 16, 64), ({"window": "150B"}, 150, 128)],
    ids=str,
)
def test_a_step_prefetches_whole_experts(
    chosen: dict[str, str], measured: int, window: int
) -> None:
    assert whole_experts(decided(**AHEAD, **chosen), measured) == window
    assert whole_experts(decided("host", **AHEAD), measured) == measured


def test_less_than_an_expert_cannot_be_prefetched() -> None:
    with pytest.raises(BadUsage, match="give --window 64 or more"):
        whole_experts(decided(**AHEAD, window="63B"), 63)


def test_a_model_of_one_layer_has_no_next_one() -> None:
    shape = replace(SHAPE, num_layers=1)
    with pytest.raises(BadUsage, match="there is one only"):
        cache_on_device(decided(shape=shape, **AHEAD), controller_of(4, shape))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_a_session_is_refused(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("olmoe")), device="cpu")
    with pytest.raises(BadUsage, match="--decide device needs a GPU"):
        Session(opened, Settings(experts="fused", decide="device"))
