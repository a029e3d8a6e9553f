"""Requests of a session: what is refused, how they are numbered, and what their effort counts."""

import ctypes
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from artifacts.errors import BadInput, BadUsage
from runtime.model.layout import ALIGNMENT
from runtime.session import session as module
from runtime.session.generation.sampling import Sampling
from runtime.session.generation.stream import Effort
from runtime.session.session import Session
from runtime.session.settings import Settings
from tests.conftest import Checkpoint

PROMPT = torch.arange(3, 9)[None]
RATE = 1e6  # bytes per second


def test_a_checkpoint_is_opened_by_its_name(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with Session.open(checkpoint("olmoe")) as session:
        assert session.parts.settings == Settings()
    with Session.open(str(checkpoint("olmoe")), Settings(budget="100%", device="cpu")) as session:
        assert session.parts.settings.budget == "100%"
    with pytest.raises(BadInput, match="there is no store"):
        Session.open(checkpoint("olmoe"), store=str(tmp_path / "none.duckdb"))


def test_tokens_outside_the_vocabulary_and_beyond_the_positions_are_refused(
    session: Session,
) -> None:
    longest = session.opened.config.max_position_embeddings
    with pytest.raises(BadInput, match="token 96 is outside the vocabulary of 96"):
        session.forward(torch.full((1, 2), 96))
    past = session.forward(torch.full((1, longest), 5)).past_key_values
    for ids, given in ((torch.full((1, longest + 1), 5), None), (torch.full((1, 1), 5), past)):
        with pytest.raises(
            BadInput, match=f"{longest + 1} tokens exceed the model's {longest} positions"
        ):
            session.forward(ids, past=given)
    session._check(torch.zeros(1, 0, dtype=torch.int64), None)  # no token is too many or unknown
    session.forward(torch.full((longest // 16 + 1, 2), 5))  # a batch may have any number of rows


def test_padding_is_masked_and_a_pass_continues_from_the_one_before(session: Session) -> None:
    whole = session.forward(PROMPT).logits
    first = session.forward(PROMPT[:, :4])
    later = session.forward(PROMPT[:, 4:], past=first.past_key_values, mask=torch.ones_like(PROMPT))
    assert torch.allclose(torch.cat((first.logits, later.logits), dim=1), whole, atol=1e-5)
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.int64), PROMPT), dim=1)
    mask = (torch.arange(9) >= 3).long()[None]
    assert torch.allclose(session.forward(padded, mask=mask).logits[:, 3:], whole, atol=1e-5)
    assert not torch.allclose(session.forward(padded).logits[:, 3:], whole, atol=1e-2)


def test_requests_are_numbered_one_after_another_from_0(session: Session) -> None:
    recorder = session.record()
    session.new_requests(2)
    session.forward(PROMPT.repeat(2, 1))
    for _ in range(2):
        assert len(list(session.tokens(PROMPT, Sampling(2, ignore_eos=True)))) == 2
    trace = recorder.trace()
    assert sorted(set(trace.request.tolist())) == [0, 1, 2, 3]
    assert trace.embeddings.shape[0] == 6 and (trace.probabilities.sum(axis=1) > 0.99).all()


def test_a_generation_tells_its_own_effort(session: Session) -> None:
    session.forward(PROMPT)
    told: list[Effort] = []
    tokens = list(session.tokens(PROMPT, Sampling(3, ignore_eos=True), on_end=told.append))
    assert len(tokens) == 3 and told == [session.effort(first_pass=1)]
    every = session.effort()
    assert every.counters["requests"] > told[0].counters["requests"] > 0
    assert every.exposed_ms == pytest.approx(every.counters["demand_bytes"] / RATE * 1e3, rel=1e-6)
    assert every.exposed_ms > told[0].exposed_ms > 0


def test_a_stream_follows_the_sampling_that_is_given(session: Session) -> None:
    answer = session.stream("sheep", Sampling(2, ignore_eos=True)).answer()
    assert len(answer.token_ids) == 2
    stream = session.stream("sheep")
    assert answer.text.startswith(next(stream))
    stream.close()


def test_tokens_come_with_their_index_and_time(session: Session) -> None:
    begin_s = time.perf_counter()
    tokens = list(session.tokens(PROMPT, Sampling(3, ignore_eos=True)))
    took_s = time.perf_counter() - begin_s
    assert [token.index for token in tokens] == [0, 1, 2]
    seconds = [token.seconds for token in tokens]
    assert seconds[0] > 0 and seconds == sorted(seconds) and seconds[-1] < took_s


def test_a_new_thread_computes_with_the_number_of_threads_in_force(session: Session) -> None:
    """Products round differently with torch's default number, which a new thread has."""
    openmp = next(Path(torch.__file__).parent.glob("lib/libgomp*"), None)
    if openmp is None:
        pytest.skip("this torch does not come with GNU's OpenMP, which is asked here")
    # torch.get_num_threads() would set the number of a new thread before it tells it, as a product
    # would not.
    num_threads_of_this = ctypes.CDLL(str(openmp)).omp_get_max_threads
    before = torch.get_num_threads()
    seen = []
    session.watcher.on_pass = lambda requests: seen.append(num_threads_of_this())
    try:
        for num_threads in (before + 1, before + 2):
            torch.set_num_threads(num_threads)
            thread = threading.Thread(target=session.forward, args=(PROMPT,))
            thread.start()
            thread.join()
        assert seen == [before + 1, before + 2]
    finally:
        torch.set_num_threads(before)


def test_a_session_that_lost_its_slots_is_closed(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(parts: object) -> None:
        raise MemoryError("for slots")

    monkeypatch.setattr(module, "lay_out_slots", fail)
    with pytest.raises(MemoryError, match="for slots"):
        session._lay_out(session.parts.fast)
    with pytest.raises(BadUsage, match="the session is closed"):
        session.forward(PROMPT)


def test_a_fast_tier_beyond_the_budget_is_seen(session: Session) -> None:
    """Slots begin on borders, which may cost one border each and one more."""
    session.validate()
    slots = session.parts.slots
    parts = session.parts
    most = parts.controller.cache.num_slots * parts.opened.shape.expert_nbytes + ALIGNMENT * (
        len(slots) + 1
    )
    slots.nbytes = most
    session.validate()
    slots.nbytes = most + 1
    with pytest.raises(AssertionError, match="bytes of fast tier, the budget is"):
        session.validate()
    session.parts = replace(parts, budget="100%")
    session.validate()
