"""The engine takes a model over and gives it back, bills each pass for its own waits, and sees a
state that cannot be."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from artifacts.errors import BadUsage
from runtime.control.cache import LOADING, RESIDENT
from runtime.engine.engine import Engine
from runtime.links.emulated import EmulatedLink
from runtime.links.link import PREFETCH
from runtime.model.open import MoeModel
from runtime.session.session import Session, Settings

RATE = 1e6  # bytes per second
PROMPT = torch.arange(3, 9)[None]
OTHER = torch.arange(20, 27)[None]


@contextmanager
def failing(module: nn.Module) -> Iterator[None]:
    def fail(module: nn.Module, args: tuple) -> None:
        raise MemoryError("between two steps")

    handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def broken_off(session: Session, ids: torch.Tensor = OTHER) -> None:
    """Run a pass whose first layer loads and computes experts, and that fails before the second
    one."""
    with (
        failing(session.opened.layers[1].gate),
        pytest.raises(MemoryError, match="between two steps"),
    ):
        session.forward(ids)


def loads_s(session: Session, first_pass: int = 0) -> float:
    return session.effort(first_pass=first_pass).counters["demand_bytes"] / RATE


def test_the_engine_takes_a_model_over_and_gives_it_back(opened: MoeModel) -> None:
    with Session(opened, Settings()) as session:
        assert all("moectl_forward" in vars(layer.experts) for layer in opened.layers)
        with pytest.raises(BadUsage, match="the model runs in another session"):
            Session(opened, Settings())
        session.forward(PROMPT)
    assert not any("moectl_forward" in vars(layer.experts) for layer in opened.layers)
    assert not opened.model._forward_pre_hooks and not opened.model._forward_hooks
    assert opened.model.config._experts_implementation == "eager"


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_device_that_holds_all_experts_has_them_before_the_first_pass(
    opened: MoeModel, monkeypatch: pytest.MonkeyPatch, is_queued: bool
) -> None:
    """And again after a pass that failed. On a GPU a layer that lacks one expert would wait for the
    host at each token, and some experts are not used for hundreds of tokens."""
    monkeypatch.setattr(EmulatedLink, "is_queued", is_queued)
    with Session(opened, Settings(preset="full", link="1GB/s")) as session:
        expected = opened.shape.num_keys if is_queued else 0
        for _ in range(2):
            assert (
                session.controller.cache.state.sum() == expected * RESIDENT
                and not session.engine.steps.pending
            )
            session.engine.validate()
            session.forward(PROMPT)
            with pytest.raises(MemoryError), failing(opened.layers[0].gate):
                session.forward(PROMPT)
            session.engine._begin_pass(opened.model, (PROMPT,), {})
        assert (session.controller.counters.totals()["misses"] == 0) == is_queued


def test_experts_are_computed_with_their_device_as_the_current_one(
    opened: MoeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches kernels on the current device, which is the first one, wherever the operands
    lie."""
    entered: list[torch.device] = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.append(torch.device("cuda", 0))

    monkeypatch.setattr(torch.cuda, "device", current)
    second = torch.device("cuda", 1)
    on_second = replace(opened, model=SimpleNamespace(device=second))
    steps = SimpleNamespace(run=lambda layer, hidden, ids, weights: entered[-1])
    engine = SimpleNamespace(
        steps=steps, road=None, captured=None, _opened=on_second, clear=lambda: None
    )
    forward = Engine._layer_forward(engine, opened.layers[0])
    assert forward(None, None, None) == second
    assert entered[-1] == torch.device("cuda", 0)


def test_a_pass_stalls_for_its_own_loads(session: Session) -> None:
    for ids in (PROMPT, OTHER, PROMPT):
        first_pass = session.num_passes
        session.forward(ids)
        assert session.engine.stall_s[first_pass] == pytest.approx(
            loads_s(session, first_pass)
        ) and loads_s(session)
    assert session.effort().counters["hits"] > 0, "a pass leaves its experts to the next one"


def test_the_stall_of_a_broken_pass_is_not_billed_to_the_next_request(session: Session) -> None:
    broken_off(session)
    assert session.engine.steps.link._stall_s > 0
    session.forward(PROMPT)
    assert session.num_passes == len(session.engine.stall_s) == 1, "the first pass never ended"
    assert session.engine.stall_s == [pytest.approx(loads_s(session))]
    broken_off(session)
    session.forward(OTHER)
    assert session.num_passes == len(session.engine.stall_s) == 2
    assert session.engine.stall_s[1] == pytest.approx(loads_s(session, first_pass=1))


def test_the_pass_after_a_broken_one_begins_when_no_copy_is_under_way(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no later pass waits for copies: its prefetches may go on."""
    waits: list[int] = []
    monkeypatch.setattr(
        session.engine.steps.link, "wait_for_copies", lambda: waits.append(session.num_passes)
    )
    session.forward(PROMPT)
    broken_off(session)
    assert waits == []
    session.forward(PROMPT)
    session.forward(PROMPT)
    assert waits == [1]


def test_a_step_that_fails_empties_the_fast_tier_at_once(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.forward(PROMPT)
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(
            session.engine.steps.backend, "finish", lambda: (_ for _ in ()).throw(MemoryError())
        )
        session.forward(OTHER)
    assert not any(session.controller.cache.places) and session.num_passes == 1
    session.validate()
    session.forward(PROMPT)
    assert session.engine.stall_s[1] == pytest.approx(loads_s(session, first_pass=1))


def test_passes_that_are_folded_count_as_one_with_all_their_stalls(session: Session) -> None:
    for ids in (PROMPT, OTHER):
        session.forward(ids)
    requests = session.effort().counters["requests"]
    session.fold()
    assert session.engine.stall_s == [pytest.approx(loads_s(session))] and session.num_passes == 1
    broken_off(session)
    session.forward(PROMPT)
    assert session.num_passes == len(session.engine.stall_s) == 2
    assert session.engine.stall_s[1] == pytest.approx(loads_s(session, first_pass=1))
    assert session.effort().counters["requests"] > requests


def some_place(session: Session) -> object:
    return next(place for place in session.controller.cache.places if place)


def coming(session: Session, key: int, bits: int) -> None:
    """Issue a transfer into the slot of a resident expert."""
    slot = some_place(session).slot
    transfer = session.parts.tiers.link.issue(
        key, session.parts.slots[slot], urgency=PREFETCH, bits=bits
    )
    session.engine.steps.pending[slot] = transfer


def set_loading(session: Session) -> None:
    session.controller.cache.states[some_place(session).key] = LOADING


def validated(session: Session) -> None:
    """The engine's own part: the controller's has tests of its own."""
    session.controller.validate = lambda: None
    session.engine.validate()


def test_a_sound_state_is_valid_also_while_an_expert_comes(session: Session) -> None:
    session.forward(PROMPT)
    validated(session)
    place = some_place(session)
    coming(session, place.key, place.bits)
    validated(session)
    set_loading(session)
    validated(session)


@pytest.mark.parametrize("number", [1, -1])
def test_slots_that_the_controller_does_not_know_are_seen(session: Session, number: int) -> None:
    slots = session.engine.steps.resident.slots
    slots._slots = slots._slots[:-1] if number < 0 else [*slots._slots, slots._slots[0]]
    with pytest.raises(AssertionError, match="slots"):
        validated(session)


@pytest.mark.parametrize("device", [1, -1])
def test_an_expert_on_another_device_is_seen(session: Session, device: int) -> None:
    session.forward(PROMPT)
    session.parts.slots.device_of[some_place(session).slot] = device
    with pytest.raises(AssertionError, match=f"of device 0 is in slot .* of device {device}"):
        validated(session)


def test_an_expert_that_its_slot_cannot_hold_is_seen(session: Session) -> None:
    session.forward(PROMPT)
    slot = some_place(session).slot
    session.parts.slots._slots[slot] = session.parts.slots[slot][:-1]
    with pytest.raises(AssertionError, match="bytes, and slot"):
        validated(session)


@pytest.mark.parametrize(("key", "bits"), [(1, 0), (-1, 0), (0, 8), (0, -8)])
def test_a_transfer_of_another_expert_or_at_other_bits_is_seen(
    session: Session, key: int, bits: int
) -> None:
    session.forward(PROMPT)
    place = some_place(session)
    coming(session, place.key + key, place.bits + bits)
    with pytest.raises(AssertionError, match="comes into it"):
        validated(session)


def test_an_expert_that_nothing_brings_is_seen(session: Session) -> None:
    session.forward(PROMPT)
    set_loading(session)
    with pytest.raises(AssertionError, match="nothing brings it"):
        validated(session)
