"""Faults of links and of memory, class 17 of tests/faults: each is a function of a case and its
session."""

import random
import threading
import time

import torch

from artifacts.errors import OutOfResources, Problem
from runtime.session.session import Session
from tools.torments import lossless
from tools.torments.cases import Lost
from tools.torments.engine_case import EngineCase
from tools.torments.engine_checks import Held, check
from tools.torments.faulty_links import failing, held, sleeping
from tools.torments.interrupting import OutOfMemory, allocations

_MANY = 1000


def transfer_fails(case: EngineCase, session: Session) -> None:
    error = case.rng.choice(
        (lambda: OSError(5, "Input/output error"), MemoryError, lambda: RuntimeError("broken"))
    )
    case.faults.moving = failing(case.rng.randint(0, 40), error)
    with case.ends_with(Problem, OSError, MemoryError, RuntimeError):
        lossless.said(session, case.request())


def issue_fails(case: EngineCase, session: Session) -> None:
    case.faults.issuing = failing(case.rng.randint(0, 40), lambda: MemoryError())
    with case.ends_with(MemoryError):
        lossless.said(session, case.request())


def everything_fails(case: EngineCase, session: Session) -> None:
    share = case.rng.choice((0.05, 0.3, 1.0))
    rng = random.Random(case.rng.random())

    def fault(number: int) -> None:
        if rng.random() < share:
            raise OSError(5, "Input/output error")

    case.faults.moving = fault
    for _ in range(3):
        with case.ends_with(Problem, OSError):
            lossless.said(session, case.request())
        check(session, "a link that fails")


def slow_and_reordered(case: EngineCase, session: Session) -> None:
    rng = random.Random(case.rng.random())
    case.faults.moving = sleeping(lambda number: rng.random() * 3e-3)
    case.faults.landing = lambda number: rng.random() < 0.5
    case.exact(session, "17: a link that reorders")


def stuck(case: EngineCase, session: Session) -> None:
    """One read takes longer than the patience of the link, and then completes."""
    if case.settings.link != "disk":
        slow_and_reordered(case, session)
        return
    gate = threading.Event()
    case.faults.moving = held(case.rng.randint(0, 10), gate)
    case.faults.patience_s = 0.2
    begin_s = time.perf_counter()
    try:
        for _ in range(2):
            with case.ends_with(OutOfResources):
                lossless.said(session, case.request())
            check(session, "a link that is stuck")
    finally:
        gate.set()
    if time.perf_counter() - begin_s > 20:
        raise Lost(f"17: {time.perf_counter() - begin_s:.0f} s until a stuck link was told")


def out_of_memory(case: EngineCase, session: Session) -> None:
    request = case.request()
    with OutOfMemory() as counted:
        lossless.said(session, request)
    with (
        case.ends_with(torch.OutOfMemoryError, Problem),
        OutOfMemory(case.rng.randint(1, counted.count)),
    ):
        lossless.said(session, request)


def building_fails(case: EngineCase, session: Session) -> None:
    """One allocation of a new session fails; the model stays as it was."""
    session.close()
    with allocations() as asked, case.session():
        num_allocations = len(asked)
    at = case.rng.randint(1, num_allocations)
    with case.ends_with(Problem, RuntimeError), allocations(at), case.session():
        pass
    session.__init__(case.model.opened, case.settings)


def many(case: EngineCase, session: Session) -> None:
    """Send a thousand requests, every tenth of them failing: memory does not grow after the first
    hundred."""
    for number in range(_MANY):
        if number == 100:
            before = Held.now()
        if number % 10 == 0:
            transfer_fails(case, session)
            case.faults.mend()
        else:
            session.new_requests(1)
            session.forward(case.model.requests[0].prompts)
        session.fold()
    Held.now().check(before, "a thousand requests")
