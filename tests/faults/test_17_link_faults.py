"""A link fails, stalls or reorders, or memory runs out: the request ends with a reason, and the
next one is exact.

`tools/torments/cases/engine_faults.py` does the same over every preset, at any transfer and
allocation.
"""

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from artifacts.errors import BadInput, BadUsage, OutOfResources
from moectl.shared.terminal.exit_codes import exit_code_of
from runtime.links.link import DEMAND, PREFETCH
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint
from tools.torments.cases import Lost
from tools.torments.engine_checks import Held, check
from tools.torments.faulty_links import Faults, failing, failing_from, held, installed, sleeping
from tools.torments.interrupting import OutOfMemory, allocations
from tools.torments.lossless import Model, differs, said

pytestmark = pytest.mark.slow

LINKS = ("disk", "2GB/s")


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Iterator[Model]:
    made = Model(Path(checkpoint("olmoe", "hub", "float32")), "olmoe")
    yield made
    made.opened.store.close()


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def faults() -> Iterator[Faults]:
    with installed(Faults()) as made:
        yield made


def session_of(model: Model, link: str = "disk", **settings: object) -> Session:
    return Session(
        model.opened, Settings("specmd", budget="50%", window="2KiB", **{"link": link} | settings)
    )


def next_is_exact(session: Session, model: Model) -> None:
    session.validate()
    for request in model.requests[:2]:
        assert not differs(said(session, request), request.logits)
        check(session, "a fault")


@pytest.mark.parametrize("at", [0, 5, 11])
def test_a_transfer_that_fails_ends_the_request(
    link: str, at: int, model: Model, faults: Faults
) -> None:
    with session_of(model, link) as session:
        faults.moving = failing_from(at, lambda: MemoryError("of the link"))
        with pytest.raises(MemoryError, match="of the link"):
            said(session, model.requests[1])
        faults.mend()
        next_is_exact(session, model)


def test_what_had_been_issued_when_issuing_failed_does_not_come_later(
    model: Model, faults: Faults
) -> None:
    """An unrecorded transfer must not land in a slot that another expert has by then."""
    gate = threading.Event()
    with session_of(model) as session:
        faults.moving = held(0, gate)
        faults.issuing = failing(2, MemoryError)
        with pytest.raises(MemoryError):
            said(session, model.requests[1])
        faults.issuing = lambda number: gate.set()
        next_is_exact(session, model)


def test_what_the_disk_refuses_is_told_by_expert(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session_of(model) as session:

        def broken(*_: object, **__: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with (
            monkeypatch.context() as patched,
            pytest.raises(BadInput, match="expert .* cannot be read .*check the disk"),
        ):
            patched.setattr(model.opened.store, "read", broken)
            patched.setattr(model.opened.store, "read_kept", lambda *_: False)
            said(session, model.requests[0])
        next_is_exact(session, model)


def test_a_link_that_is_stuck_is_told_until_it_is_not(model: Model, faults: Faults) -> None:
    """Meanwhile nothing is written to a slot that the stuck read may still write to."""
    gate = threading.Event()
    with session_of(model) as session:
        next_is_exact(session, model)
        faults.mend()
        faults.moving = held(0, gate)
        faults.patience_s = 0.2
        for _ in range(2):
            with pytest.raises(OutOfResources, match="nothing came over the disk link for 0.2 s"):
                said(session, model.requests[1])
            session.validate()
        gate.set()
        faults.mend()
        next_is_exact(session, model)


def test_slow_is_not_stuck(model: Model, faults: Faults) -> None:
    """Other transfers that land show that the link works."""
    with session_of(model) as session:
        link = session.parts.tiers.link
        faults.moving = sleeping(lambda number: 0.25)
        faults.patience_s = 1.0
        buffers = [
            torch.empty(model.opened.shape.expert_nbytes, dtype=torch.uint8)
            for _ in range(5 * link.num_threads)
        ]
        transfers = [link.issue(key % 8, slot, urgency=DEMAND) for key, slot in enumerate(buffers)]
        link.collect(transfers[-1])


def test_any_order_of_arrival_gives_the_same_bits(link: str, model: Model, faults: Faults) -> None:
    faults.moving = sleeping(lambda number: (number * 7 % 5) * 4e-4)
    faults.landing = lambda number: number % 3 > 0
    with session_of(model, link) as session:
        next_is_exact(session, model)


def test_a_thread_that_waits_keeps_no_slot(model: Model) -> None:
    """Slots that are replaced must be freed entirely, since the budget has no room for both."""
    with session_of(model) as session:
        link = session.parts.tiers.link
        before = Held.now()
        slots = [torch.empty(model.opened.shape.expert_nbytes, dtype=torch.uint8) for _ in range(8)]
        for transfer in [
            link.issue(key, slot, urgency=key % 2 and PREFETCH) for key, slot in enumerate(slots)
        ]:
            link.collect(transfer)
        del slots, transfer
        link.wait_for_copies()
        Held.now().check(before, "a link")


@pytest.mark.parametrize("share", [0.01, 0.4, 0.9])
def test_no_memory_for_a_tensor(share: float, model: Model) -> None:
    with session_of(model) as session:
        with OutOfMemory() as counted:
            said(session, model.requests[1])
        with (
            pytest.raises(torch.OutOfMemoryError) as caught,
            OutOfMemory(1 + int(share * counted.count)),
        ):
            said(session, model.requests[1])
        next_is_exact(session, model)
    assert exit_code_of(lambda: (_ for _ in ()).throw(caught.value)) == 4


def test_a_session_that_cannot_be_built_leaves_nothing(model: Model) -> None:
    """Fail at each allocation in turn, and where policies are incompatible after the link was
    opened."""
    with allocations() as asked, session_of(model):
        num_allocations = len(asked)
    before = Held.now()
    failed = 0
    for at in range(1, num_allocations + 1):
        try:
            with allocations(at), session_of(model):
                """Compiling and the like can do without."""
        except (OutOfResources, RuntimeError):
            failed += 1
    assert failed
    with pytest.raises(BadUsage, match="follows predictions"):
        session_of(model, policies={"routing": "pre_gated", "prefetch": "none"})
    Held.now().check(before, "a session that was not built")
    assert not model.opened.model._forward_hooks and not model.opened.model._forward_pre_hooks
    with session_of(model) as session:
        next_is_exact(session, model)


def test_nothing_stays_behind_requests_that_fail(model: Model, faults: Faults) -> None:
    with session_of(model) as session:
        for number in range(60):
            if number == 20:
                before = Held.now()
            faults.mend()
            if number % 5 == 0:
                faults.moving = failing_from(number % 3, MemoryError)
                with pytest.raises(MemoryError):
                    said(session, model.requests[4])
            else:
                said(session, model.requests[0])
            session.fold()
        Held.now().check(before, "forty requests")
        counters = session.controller.counters
        assert len(counters.passes) == len(session.engine.stall_s) == 1
        assert counters.totals()["requests"] > 0


def test_a_long_prompt_leaves_no_hidden_states_behind(model: Model) -> None:
    with session_of(model) as session:
        session.forward(torch.full((1, 2), 5))
        before = Held.now()
        session.forward(torch.full((1, 200), 5))
        Held.now().check(before, "a long prompt")


def test_counts_and_stalls_are_of_passes_that_came_to_an_end(model: Model, faults: Faults) -> None:
    with session_of(model) as session:
        said(session, model.requests[0])
        faults.mend()
        faults.moving = failing_from(3, MemoryError)
        with pytest.raises(MemoryError):
            said(session, model.requests[1])
        faults.mend()
        said(session, model.requests[0])
        assert len(session.controller.counters.passes) == len(session.engine.stall_s) == 6


Broken = Callable[[Session], None]
BROKEN: dict[str, tuple[Broken, str]] = {
    "a slot that is lost": (
        lambda session: session.controller.cache.free_slots[0].append(0),
        "lost or held twice",
    ),
    "a pin that is left": (
        lambda session: session.controller.cache.pins.__setitem__(3, 1),
        "pinned",
    ),
    "an expert that nobody sent for": (lambda session: _set_loading(session), "on their way"),
    "a hit too many": (lambda session: session.controller.counters.add(1, 0, 1), "of .* requests"),
    "bytes that were not sent": (
        lambda session: session.controller.counters.add(15, 0, 1 << 40),
        "wasted",
    ),
    "another expert in a slot": (
        lambda session: session.parts.slots[_some_slot(session)].add_(1),
        "does not hold",
    ),
    "a transfer of another key": (lambda session: _misdirect(session), "comes into it"),
}


def _some_slot(session: Session) -> int:
    return next(place.slot for place in session.controller.cache.places if place)


def _set_loading(session: Session) -> None:
    cache = session.controller.cache
    cache.states[next(place.key for place in cache.places if place)] = 1


def _misdirect(session: Session) -> None:
    slot = _some_slot(session)
    session.engine.steps.pending[slot] = session.parts.tiers.link.issue(
        15, session.parts.slots[slot], urgency=PREFETCH
    )


@pytest.mark.parametrize("name", BROKEN)
def test_validate_sees(name: str, model: Model) -> None:
    breaking, message = BROKEN[name]
    with Session(model.opened, Settings("on-demand", budget="50%", link="2GB/s")) as session:
        said(session, model.requests[1])
        check(session, "nothing")
        breaking(session)
        with pytest.raises(Lost, match=message):
            check(session, "this")
