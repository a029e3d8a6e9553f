"""Measurements at the start of a session: what is timed, on what, and how rates and windows follow
from it."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from runtime.backends.backend import StepTokens
from runtime.control.plan import NO_SLOT, Place
from runtime.links.link import DEMAND
from runtime.model.open import MoeModel
from runtime.session import probe
from runtime.session.probe import (
    Rates,
    link_bytes_per_second,
    prefetch_window,
    scaled_rates,
    scaled_window,
)

CPU = torch.device("cpu")
MACHINE = SimpleNamespace(link_gbps=25.0, near_gbps=50.0, fast_gbps=100.0)
SHAPE = SimpleNamespace(expert_nbytes=1000, num_layers=4, top_k=2, num_experts=8)
OPENED = SimpleNamespace(shape=SHAPE)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Experts take a millisecond, fused ones half, the rest of a token 20 ms. Returns the
    `is_fused` that was asked."""
    asked: list[bool] = []

    def expert_seconds(opened: object, *, is_fused: bool, clock: object = None) -> float:
        asked.append(is_fused)
        return 0.5e-3 if is_fused else 1e-3

    monkeypatch.setattr(probe, "expert_seconds", expert_seconds)
    monkeypatch.setattr(probe, "rest_seconds", lambda opened, *, dense, is_fused: 0.02)
    monkeypatch.setattr(probe, "rounded_window", lambda experts, nbytes: (experts, nbytes))
    return asked


def test_rates_have_the_ratios_of_the_target(timed: list[bool]) -> None:
    assert scaled_rates(OPENED, MACHINE) == Rates(link=0.25e6, near=0.5e6)
    assert scaled_rates(OPENED, MACHINE, is_fused=True) == Rates(link=0.5e6, near=1e6)
    assert timed == [False, True]


def test_a_scaled_window_is_computed_from_the_target(timed: list[bool]) -> None:
    assert scaled_window(SHAPE, MACHINE) == (0.5, 1000) and timed == []


def test_a_window_is_what_the_link_moves_while_a_layer_is_computed(timed: list[bool]) -> None:
    """A layer takes 5 ms besides its two experts."""
    experts, nbytes = prefetch_window(OPENED, 1e6)
    assert experts == pytest.approx(7.0) and nbytes == 1000
    assert prefetch_window(OPENED, 1e6, is_fused=True)[0] == pytest.approx(6.0)
    assert timed == [False, True]


class Link:
    """A link on which a load takes a millisecond for each byte of its slot, on the given clock."""

    def __init__(self, now_s: list[float]) -> None:
        self.keys: list[int] = []
        self.drained = 0
        self._now_s = now_s

    def issue(self, key: int, slot: torch.Tensor, *, urgency: int) -> torch.Tensor:
        assert urgency == DEMAND
        self.keys.append(key)
        return slot

    def collect(self, transfer: torch.Tensor) -> None:
        self._now_s[0] += 1e-3 * len(transfer)

    def drain_stalls(self) -> float:
        self.drained += 1
        return 0.0


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [100.0]
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    return now_s


@pytest.mark.parametrize(
    ("num_slots", "num_experts", "num_devices", "keys"),
    [
        (9, 64, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
        (3, 64, 1, [0, 1, 2, 0, 1, 2, 0, 1]),
        (9, 2, 1, [0, 1] * 4),
        (1, 64, 1, [0] * 8),
        (9, 5, 2, [0, 2, 4, 0, 2, 4, 0, 2]),
    ],
)
def test_bandwidth_is_measured_on_experts_of_the_first_device_in_slots_that_are_there(
    now_s: list[float], num_slots: int, num_experts: int, num_devices: int, keys: list[int]
) -> None:
    link = Link(now_s)
    slots = [torch.zeros(4, dtype=torch.uint8) for _ in range(num_slots)]
    named = {} if num_devices == 1 else {"num_devices": num_devices}
    assert link_bytes_per_second(link, slots, num_experts, **named) == pytest.approx(1e3)
    assert link.keys == keys and link.drained == 1


def test_calls_of_the_warm_up_are_left_out(now_s: list[float]) -> None:
    turns: list[int] = []

    def work(turn: int) -> None:
        assert torch.is_inference_mode_enabled()
        turns.append(turn)
        now_s[0] += 9.0 if turn < 2 else turn

    assert probe.seconds_of(work, CPU, warm_up=2, turns=3) == [2.0, 3.0, 4.0] and turns == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert probe._median_seconds(work, CPU, warm_up=2, turns=3) == 3.0


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list:
    """The arguments of each call of one of the module's functions."""
    calls = []
    plain = getattr(probe, name)

    def call(*given: object, **named: object) -> object:
        calls.append(given)
        return plain(*given, **named)

    monkeypatch.setattr(probe, name, call)
    return calls


def test_several_experts_of_the_first_layer_take_turns_on_one_token(
    opened: MoeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch, "expert_forward")
    monkeypatch.setattr(probe, "_NUM_EXPERTS", 3)
    assert 0 < probe.expert_seconds(opened) < 1
    assert all(module is opened.layers[0].experts for module, _, _ in calls)
    assert {x.shape for _, _, x in calls} == {(1, opened.config.hidden_size)}
    assert len(calls) == 10 + 200, "the first ten only warm up"
    first = [views["down_proj"] for _, views, _ in calls[:4]]
    assert (
        first[0].data_ptr() == first[3].data_ptr() and len({part.data_ptr() for part in first}) == 3
    )
    content = torch.empty(opened.store.layout.nbytes, dtype=torch.uint8)
    for expert in range(3):
        opened.store.read(0, expert, content)
        assert torch.equal(opened.store.layout.views(content)["down_proj"], first[expert])


def test_a_near_tier_is_timed_on_one_token_s_experts_of_the_first_layer_in_turns(
    opened: MoeModel, now_s: list[float]
) -> None:
    steps = []

    class Recorded:
        """Takes a second for each step, and notes its experts."""

        def begin(self, tokens: StepTokens) -> "Recorded":
            assert tokens.hidden.shape == (1, opened.config.hidden_size) and tokens.are_routed
            assert tokens.ids.tolist() == tokens.experts.tolist()
            return self

        def add_near(self, places: list[Place], near: str, ready: list[Place]) -> None:
            assert near == "near" and not ready
            assert {place.slot for place in places} == {NO_SLOT}
            steps.append([place.key for place in places])

        def finish(self) -> None:
            now_s[0] += 1.0

    rate = probe.near_bytes_per_second(opened, "near", Recorded())
    shape = opened.shape
    assert rate == shape.top_k * shape.expert_nbytes
    used = [key for keys in steps for key in keys]
    assert used[: shape.num_experts] == list(range(shape.num_experts)) and len(steps) == 10 + 16


def test_fused_experts_are_timed_by_their_own_code(
    opened: MoeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def timed_experts(opened: MoeModel, contents: list[torch.Tensor]) -> Callable[[], None]:
        assert len(contents) == opened.shape.top_k and contents[0].dtype is torch.uint8
        return lambda: calls.append(len(contents))

    monkeypatch.setattr(
        probe, "choose_backend", lambda opened: SimpleNamespace(timed_experts=timed_experts)
    )
    assert probe.expert_seconds(opened, is_fused=True) >= 0
    assert calls == [opened.shape.top_k] * 110


class Dense:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def install(self) -> None:
        self.calls.append("install")

    def uninstall(self) -> None:
        self.calls.append("uninstall")


def test_the_rest_of_a_token_is_timed_without_experts_and_with_what_computes_it(
    opened: MoeModel,
) -> None:
    seen = []
    dense = Dense()
    handle = opened.model.register_forward_pre_hook(
        lambda model, args, kwargs: seen.append(
            (kwargs["input_ids"].shape, model.config._experts_implementation)
        ),
        with_kwargs=True,
    )
    assert 0 < probe.rest_seconds(opened, dense=dense) < 1 and dense.calls == [
        "install",
        "uninstall",
    ]
    assert probe.rest_seconds(opened) > 0
    handle.remove()
    assert len(seen) == 2 * (2 + 8)
    assert set(seen) == {((1, 1), "moectl-no-experts")}
    assert opened.model.config._experts_implementation == "eager"
