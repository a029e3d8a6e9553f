"""Cancellations of requests, class 18 of tests/faults: each is a function of a case and its
session."""

import threading
from collections.abc import Callable

import torch

from artifacts.errors import Problem
from runtime.session.generation.sampling import Sampling, num_positions
from runtime.session.generation.single import Generation
from runtime.session.session import Session
from tools.torments import lossless
from tools.torments.cases import Lost
from tools.torments.engine_case import EngineCase
from tools.torments.faulty_links import failing
from tools.torments.interrupting import Instructions

_SHORT = Sampling(8, ignore_eos=True)


def interrupted(case: EngineCase, session: Session) -> None:
    request = case.request()
    with Instructions() as counted:
        lossless.said(session, request)
    at = case.rng.randint(1, counted.count)
    with case.ends_with(KeyboardInterrupt), Instructions(at):
        lossless.said(session, request)


def attention_fails(case: EngineCase, session: Session) -> None:
    """An error in the layers between two MoE layers."""
    at = case.rng.randint(0, 6)
    seen = []
    modules = [layer.gate for layer in case.model.opened.layers]

    def hook(*_: object) -> None:
        seen.append(1)
        if len(seen) > at:
            raise RuntimeError("out of memory in attention")

    handles = [module.register_forward_pre_hook(hook) for module in modules]
    try:
        with case.ends_with(RuntimeError):
            lossless.said(session, case.request())
    finally:
        for handle in handles:
            handle.remove()


def generation_closed(case: EngineCase, session: Session) -> None:
    tokens = session.tokens(case.prompt(), Sampling(20, ignore_eos=True))
    for _ in range(case.rng.randint(0, 5)):
        next(tokens)
    if case.rng.random() < 0.5:
        tokens.close()
    else:
        with case.ends_with(KeyboardInterrupt, StopIteration):
            tokens.throw(KeyboardInterrupt())


def session_closed(case: EngineCase, session: Session) -> None:
    """The session is closed during a generation, whose rest ends with a reason."""
    prompt = case.prompt()
    positions = num_positions(case.model.opened.model)
    num_new = min(200, positions - prompt.shape[1])
    tokens = session.tokens(prompt, Sampling(num_new, ignore_eos=True))
    next(tokens)
    session.close()
    with case.ends_with(Problem):
        if len(list(tokens)) < num_new - 1:
            raise Lost("18: a generation that was closed ends as if it were whole")
    session.__init__(case.model.opened, case.settings)


def threads(case: EngineCase, session: Session) -> None:
    """Generate on several threads and break off one generation: the others get all of their
    tokens."""
    prompts = [case.prompt() for _ in range(3)]
    alone = [[token.token_id for token in session.tokens(prompt, _SHORT)] for prompt in prompts]
    aborted = case.rng.randrange(3)
    found = [[] for _ in prompts]

    def run(number: int) -> None:
        for token in session.tokens(prompts[number], _SHORT):
            found[number].append(token.token_id)
            if number == aborted and len(found[number]) == 2:
                break

    workers = [threading.Thread(target=run, args=(number,)) for number in range(len(prompts))]
    for worker in workers:
        worker.start()
    wrong = case.wrong(session)
    for worker in workers:
        worker.join(60)
    others = [number for number in range(3) if number != aborted]
    if wrong or any(found[number] != alone[number] for number in others):
        raise Lost(f"18: {wrong or found} of threads, alone {alone}")


def in_turns(case: EngineCase, session: Session) -> None:
    """Generations interleaved pass by pass: one is closed, another may fail, the others get all of
    their tokens."""
    prompts = [case.prompt() for _ in range(3)]
    alone = [[token.token_id for token in session.tokens(prompt, _SHORT)] for prompt in prompts]
    case.faults.mend()
    if case.rng.random() < 0.5:
        case.faults.moving = failing(case.rng.randint(0, 40), MemoryError)
    left = case.rng.randrange(3)
    failed = set()
    generations = [session.begin(prompt, _SHORT) for prompt in prompts]
    found: list[list[int]] = [[] for _ in prompts]
    try:
        while not all(one.is_over for one in generations):
            for number, one in enumerate(generations):
                if number == left and len(found[number]) == 2:
                    one.close()
                elif not one.is_over and not _step(session, one, found[number]):
                    failed.add(number)
    finally:
        for one in generations:
            one.close()
    if len(failed) > 1 or any(
        found[n] != alone[n] for n in range(3) if n != left and n not in failed
    ):
        raise Lost(f"18: {found} in turns, {failed} failed, alone {alone}")


def _step(session: Session, generation: Generation, ids: list[int]) -> bool:
    """Run one pass of a generation; False if it failed."""
    try:
        ids.append(session.step(generation)[0][0].token_id)
    except MemoryError:
        return False
    return True


def row_aborted(case: EngineCase, session: Session) -> None:
    """One request of a batch is dropped between two tokens; the others continue as in the plain
    model."""
    keep = case.rng.sample(range(3), 2)
    ours = _without_a_row(case, session.forward, keep)
    theirs = _without_a_row(case, case.plain if case.is_exact else session.forward, keep)
    if wrong := case.differs(ours, theirs):
        raise Lost(f"18: after a row was given up: {wrong}")


def _without_a_row(case: EngineCase, forward: Callable, keep: list[int]) -> list[torch.Tensor]:
    request = case.model.requests[2]
    output = forward(request.prompts)
    output.past_key_values.batch_select_indices(torch.tensor(keep))
    return [output.logits, forward(request.tokens[keep, :1], past=output.past_key_values).logits]
