"""A request is cancelled, interrupted or shut out: it ends, the others are whole, and the next one
is exact.

`tests/faults/test_22_command_line.py` has exit code 130; `tools/torments/cases/engine_faults.py`
interrupts at any instruction.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from artifacts.errors import BadInput, BadUsage
from runtime.policies.shared.background import BackgroundJobs
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint
from tools.torments.engine_checks import check
from tools.torments.interrupting import Instructions
from tools.torments.lossless import Model, differs, said

SHORT = Sampling(8, ignore_eos=True)
LONG = Sampling(200, ignore_eos=True)
LATER_S = 30


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Iterator[Model]:
    made = Model(Path(checkpoint("olmoe", "hub", "float32")), "olmoe")
    yield made
    made.opened.store.close()


@pytest.fixture
def session(model: Model) -> Iterator[Session]:
    # threads of earlier tests among them, which may end meanwhile
    before = set(threading.enumerate())
    with Session(
        model.opened, Settings("specmd", budget="50%", window="2KiB", link="2GB/s")
    ) as made:
        yield made
    assert set(threading.enumerate()) <= before


def next_is_exact(session: Session, model: Model) -> None:
    for request in model.requests[:2]:
        assert not differs(said(session, request), request.logits)
        check(session, "a cancelled one")


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.7, 0.9])
def test_an_interruption_at_any_instruction(share: float, session: Session, model: Model) -> None:
    request = model.requests[1]
    said(session, request)
    with Instructions() as counted:
        said(session, request)
    with pytest.raises(KeyboardInterrupt), Instructions(1 + int(share * counted.count)):
        said(session, request)
    next_is_exact(session, model)


def test_an_interruption_while_a_failed_step_is_cleared_away(
    session: Session, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller's state is left with its pins; the next pass begins by clearing it."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(session.controller, "clear", interrupted)
        patched.setattr(session.parts.tiers.link, "collect", lambda transfer: interrupted())
        said(session, model.requests[1])
    next_is_exact(session, model)


def test_a_generation_closed_half_way_ends_at_once(session: Session, model: Model) -> None:
    for count in (0, 1, 3):
        tokens = session.tokens(model.requests[0].prompts, LONG)
        for _ in range(count):
            next(tokens)
        tokens.close()
        assert len(session.engine.stall_s) < 150, "it went on"
        next_is_exact(session, model)


def test_requests_of_several_threads_take_turns(session: Session, model: Model) -> None:
    """One is broken off and a forward runs in between: the others get all of their tokens."""
    prompts = [model.requests[number].prompts for number in (0, 1, 4)]
    alone = [[token.token_id for token in session.tokens(prompt, SHORT)] for prompt in prompts]
    found: list[list[int]] = [[], [], []]

    def run(number: int) -> None:
        for token in session.tokens(prompts[number], SHORT):
            found[number].append(token.token_id)
            if number == 1 and len(found[1]) == 2:
                return

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    next_is_exact_but_for_books = differs(
        said(session, model.requests[1]), model.requests[1].logits
    )
    for thread in threads:
        thread.join(LATER_S)
    assert not next_is_exact_but_for_books
    assert found == [alone[0], alone[1][:2], alone[2]]
    next_is_exact(session, model)


def test_two_generations_of_one_thread_do_not_wait_for_each_other(
    session: Session, model: Model
) -> None:
    first, second = (session.tokens(model.requests[number].prompts, SHORT) for number in (0, 1))
    pairs = [(one.token_id, other.token_id) for one, other in zip(first, second, strict=True)]
    assert [one for one, _ in pairs] == model.generated(model.requests[0].prompts, 8)
    assert [other for _, other in pairs] == model.generated(model.requests[1].prompts, 8)


def test_one_that_waits_can_be_cancelled_too(session: Session, model: Model) -> None:
    first, second = (session.tokens(model.requests[0].prompts, LONG) for _ in range(2))
    next(first)
    waiting = threading.Thread(target=next, args=(second, None))
    waiting.start()
    first.close()
    waiting.join(LATER_S)
    second.close()
    next_is_exact(session, model)


def test_closing_a_session_ends_what_it_generates_with_a_reason(model: Model) -> None:
    session = Session(model.opened, Settings("specmd", budget="50%", link="2GB/s"))
    tokens = session.tokens(model.requests[0].prompts, LONG)
    next(tokens)
    session.close()
    with pytest.raises(BadUsage, match="session is closed"):
        list(tokens)
    for late in (
        lambda: session.forward(model.requests[0].prompts),
        lambda: next(session.tokens(_PROMPT, SHORT)),
    ):
        with pytest.raises(BadUsage, match="session is closed"):
            late()
    session.close()
    with Session(model.opened, Settings("full")) as other:
        next_is_exact(other, model)


def test_a_row_of_a_batch_that_is_given_up_leaves_the_others_as_they_were(
    session: Session, model: Model
) -> None:
    request = model.requests[2]
    keep = torch.tensor([0, 2])

    def plain(ids: torch.Tensor, past: object = None) -> object:
        with torch.inference_mode():
            return model.plain(ids, past_key_values=past, use_cache=True)

    logits = []
    for forward in (session.forward, plain):
        output = forward(request.prompts)
        output.past_key_values.batch_select_indices(keep)
        logits.append(
            [output.logits, forward(request.tokens[keep, :1], past=output.past_key_values).logits]
        )
    assert not differs(*logits)
    session.validate()


def test_a_request_beyond_the_models_positions_is_refused(session: Session, model: Model) -> None:
    longest = model.opened.config.max_position_embeddings
    with pytest.raises(BadInput, match=f"exceed the model's {longest} positions"):
        next(session.tokens(torch.full((1, longest), 5), SHORT))
    with pytest.raises(BadInput, match=f"exceed the model's {longest} positions"):
        session.forward(torch.full((1, longest + 1), 5))
    output = session.forward(torch.full((1, longest), 5))
    with pytest.raises(BadInput, match=f"exceed the model's {longest} positions"):
        session.forward(torch.full((1, 1), 5), past=output.past_key_values)
    next_is_exact(session, model)


def test_an_interrupted_job_is_done_by_who_asks_next() -> None:
    jobs = BackgroundJobs()
    calls = []

    def work() -> int:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return 7

    job = jobs.add(work)
    with pytest.raises(KeyboardInterrupt):
        jobs.answer(job)
    assert jobs.answer(job) == 7


_PROMPT = torch.full((1, 3), 5)
