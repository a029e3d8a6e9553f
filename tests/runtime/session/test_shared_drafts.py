"""Requests that share passes with drafts, each with its own number: their tokens are the undrafted
ones, and what is counted, recorded and remembered is each request's own."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runtime.control.build import build_controller
from runtime.control.counters import Counter
from runtime.drafters.base import DraftPasses, register_drafter
from runtime.model.open import MoeModel, open_model
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.presets import Scope
from runtime.replay.replay import replay
from runtime.session.generation.batch import RequestBatch, RowResult
from runtime.session.generation.charges import Charge
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session
from runtime.session.settings import Settings
from tests.conftest import Checkpoint
from tools.bench.decoding.drafted_answers import opened_tiny

SETTINGS = Settings(budget="50%", threads=1, window="16KiB")
PROMPTS = [[5, 9, 2, 14, 7, 7, 3, 1, 4], [7, 7], [3, 1, 4, 1, 5, 9, 2, 6], [11], [5, 9, 2, 14, 8]]
MOST = [3, 8, 0, 1, 2]  # drafts of each
SAMPLINGS = [
    replace(Sampling(10, ignore_eos=True), temperature=temperature, seed=seed)
    for seed, temperature in enumerate([0.0, 0.9, 0.0, 0.0, 0.0])
]


@register_drafter("known")
class Known:
    """Drafts the answers that it was told, but for every fourth token."""

    name = "known"
    wants_hidden = True
    answers: dict[tuple[int, ...], list[int]] = {}

    @classmethod
    def open(cls, opened: MoeModel, argument: str | None) -> "Known":
        return cls()

    def receipt(self) -> dict[str, object]:
        return {}

    def begin(self, prompt: Sequence[int], passes: DraftPasses) -> "KnownDrafter":
        return KnownDrafter(prompt, passes)


class KnownDrafter:
    def __init__(self, prompt: Sequence[int], passes: DraftPasses) -> None:
        self._num_prompt = len(prompt)
        self._answer = Known.answers[tuple(prompt)]
        self._passes = passes
        self._read: list[int] = []

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        assert list(tokens[: len(self._read)]) == self._read == list(tokens[:-1])
        self._passes.read([tokens[-1]])
        self._passes.read([3])
        begin = len(tokens) - self._num_prompt
        drafts = enumerate(self._answer[begin : begin + most], begin)
        return [token + (place % 4 == 3) for place, token in drafts]

    def note(self, tokens: Sequence[int], output: SimpleNamespace) -> None:
        assert output.hidden_states[-1].shape[1] >= len(tokens) > 0
        self._read += tokens

    def close(self) -> None: ...


def answered(
    session: Session, *, rows: int = 3, samplings: Sequence[Sampling] = SAMPLINGS
) -> tuple[list[list[int]], list[Charge]]:
    """Answers and charges of all prompts, three of which share a pass at first."""
    found: dict[int, list[RowResult]] = defaultdict(list)
    with RequestBatch(session, rows=rows, tile=5) as batch:
        numbers = [
            batch.add(torch.tensor([ids]), sampling, most_drafts=most)
            for ids, sampling, most in zip(PROMPTS, samplings, MOST, strict=True)
        ]
        while not batch.is_idle:
            for result in batch.step():
                assert result.error is None
                found[result.request].append(result)
    of_each = [found[number] for number in numbers]
    tokens = [[one.token_id for one in own if one.token_id is not None] for own in of_each]
    charges = [sum((one.charge for one in own), Charge()) for own in of_each]
    assert all(own[-1].is_over and not any(r.is_over for r in own[:-1]) for own in of_each)
    return tokens, charges


@pytest.fixture(scope="module")
def opened(checkpoint: Checkpoint) -> Iterator[MoeModel]:
    opened = open_model(str(checkpoint("olmoe")))
    yield opened
    opened.store.close()


def told(opened: MoeModel, settings: Settings = SETTINGS) -> list[list[int]]:
    """Undrafted answers, of which the drafter is told."""
    with Session(opened, settings) as session:
        tokens, _ = answered(session)
    prompts = map(tuple, PROMPTS)
    Known.answers = dict(zip(prompts, tokens, strict=True))
    return tokens


@pytest.mark.parametrize("preset", ["on-demand", "near", "specmd"])
def test_each_request_gets_its_undrafted_tokens_and_its_own_counts(
    opened: MoeModel, preset: str
) -> None:
    undrafted = told(opened, replace(SETTINGS, preset=preset))
    with Session(opened, replace(SETTINGS, preset=preset, draft="known:8")) as session:
        recorder = session.record()
        tokens, charges = answered(session)
        session.validate()
        assert tokens == undrafted
        counted = [
            [one.counters[kind].sum() for kind in (Counter.DRAFTED, Counter.ACCEPTED, Counter.TIES)]
            for one in charges
        ]
        effort = session.effort().counters
        totals = [effort[name] for name in ("drafted", "accepted", "ties")]
        assert np.sum(counted, axis=0).tolist() == pytest.approx(totals)
        for own, most in zip(counted, MOST, strict=True):
            assert own[0] >= own[1] >= 1 if most else own == [0, 0, 0]
        said = session.receipt()["draft"]
        assert [said[name] for name in ("drafted", "accepted", "ties")] == totals
        assert {of for of, by_drafts in said["measured"].items() if by_drafts.keys() - {"0"}} == {
            "2",
            "3",
        }
        num_tokens = session.controller.now.num_tokens
        trace = recorder.trace()
        _replayed(session, trace)
    assert num_tokens == ((trace.layer == 0) & ~trace.rejected).sum()
    kept = trace.kept()
    for number, (ids, answer) in enumerate(zip(PROMPTS, tokens, strict=True)):
        is_own = (kept.request == kept.request.min() + number) & (kept.layer == 0)
        assert sorted(kept.token[is_own]) == list(range(len(ids) + len(answer) - 1))


def _replayed(session: Session, trace) -> None:
    """Assert that a replay loads, counts and keeps what the session did."""
    live = session.controller
    receipt = session.receipt()
    again = build_controller(
        build(receipt["policies"]),
        session.opened.shape,
        num_slots=receipt["slots"],
        scope=Scope(receipt["scope"]),
        window=live.mover.arrivals.window,
        artefacts=Artefacts(),
    )
    replay(trace, again)
    ties = [int(Counter.TIES)]
    of_live, of_replay = (np.delete(one.counters.passes, ties, axis=1) for one in (live, again))
    assert np.array_equal(of_live, of_replay)
    assert np.array_equal(live.cache.state, again.cache.state)


@pytest.mark.parametrize("family", ["lfm2_moe", "qwen4_exp_text", "minimax", "gpt_oss"])
def test_rows_of_every_kind_forget_what_was_rejected(family: str) -> None:
    """States and convolutions, an index, other states, and windows."""
    with opened_tiny(family, torch.float32) as opened:
        undrafted = told(opened)
        with Session(opened, replace(SETTINGS, draft="known:8")) as session:
            assert answered(session)[0] == undrafted
            assert session.effort().counters["accepted"]
