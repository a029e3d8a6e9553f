"""Where a device cannot decide, one line says why and what to give."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.control.build import build_controller
from runtime.control.controller import Controller
from runtime.engine.output_cpu import CpuOutput
from runtime.engine.output_gpu import GpuOutput
from runtime.model.open import open_model
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.presets import Scope
from runtime.session.deciding import cache_on_device
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint

SHAPE = Shape(num_layers=2, num_experts=8, top_k=2, expert_nbytes=64)


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({"decide": "gpu"}, "host, device"),
        ({"preset": "horizon"}, "give --preset on-demand"),
        ({"policies": {"prefetch": "next_gate"}}, "give --preset on-demand"),
        ({"policies": {"eviction": "lfu:decay=0.9"}}, "no other policy than --eviction lfu"),
        ({"policies": {"residency": "split:theta=0.5"}}, "give --preset on-demand"),
        ({"scope": "global"}, "give --scope layer"),
        ({"experts": "exact"}, "give --experts fused"),
        ({"devices": 2}, "leave out --devices"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(chosen: dict[str, object], told: str) -> None:
    with pytest.raises(BadUsage, match=told):
        Settings(**{"decide": "device", "experts": "fused"} | chosen)


def decided(decide: str = "device", *, fused: type = GpuOutput, device: str = "cuda", kind: str = "cuda") -> object:
    """What a session chose, as far as it is asked who decides."""
    return SimpleNamespace(
        settings=Settings(decide=decide, experts="fused"),
        fused=fused,
        opened=SimpleNamespace(model=SimpleNamespace(device=torch.device(device)), shape=SHAPE, family="olmoe"),
        link=SimpleNamespace(kind=kind),
        policies=SimpleNamespace(eviction="lru's"),
    )


def controller_of(num_slots: int) -> Controller:
    own = {"num_slots": num_slots, "scope": Scope.LAYER, "window": 0, "artefacts": Artefacts()}
    return build_controller(build(Settings().texts()), SHAPE, **own)


@pytest.mark.parametrize(
    ("chosen", "num_slots", "told"),
    [
        (decided(fused=CpuOutput, device="cpu", kind="disk"), 8, "none for olmoe on cpu.*leave it out"),
        (decided(kind="disk"), 8, "give --link cuda"),
        (decided(kind="emulated"), 8, "give --link cuda"),
        (decided(), 3, "give --budget 4x"),
    ],
)
def test_machines_and_budgets_for_which_it_is_not_made_are_refused(chosen: object, num_slots: int, told: str) -> None:
    with pytest.raises(BadUsage, match=told):
        cache_on_device(chosen, controller_of(num_slots))


def test_it_is_used_where_something_is_left_to_decide() -> None:
    assert np.array_equal(cache_on_device(decided(), controller_of(5)).num_slots, [3, 2])
    assert cache_on_device(decided(), controller_of(16)) is None
    assert cache_on_device(decided("host"), controller_of(5)) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_a_session_is_refused(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("olmoe")), device="cpu")
    with pytest.raises(BadUsage, match="--decide device needs a GPU"):
        Session(opened, Settings(experts="fused", decide="device"))
