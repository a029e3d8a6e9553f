"""Requests with drafts get the tokens that they get without, by fewer passes, and nothing remembers
what was rejected."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from artifacts.errors import BadUsage
from artifacts.traces.parquet import read_parquet, write_parquet
from runtime.drafters.base import Draft, DraftPasses, kind_of, register_drafter
from runtime.model.open import MoeModel, open_model
from runtime.session.generation.round_robin import open_batch
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session
from runtime.session.settings import Settings
from tests.conftest import Checkpoint
from tools.bench.decoding.drafted_answers import opened_tiny

PROMPT = torch.tensor([[5, 9, 2, 14, 7, 7, 3, 1, 4, 1, 5, 9]])
GREEDY = Sampling(max_new_tokens=12, ignore_eos=True)
SETTINGS = Settings(budget="50%", threads=1)


@register_drafter("told")
class Told:
    """Drafts the answer that it was told, but for every third token."""

    name = "told"
    wants_hidden = False
    answer: Sequence[int] = ()

    @classmethod
    def open(cls, opened: MoeModel, argument: str | None) -> "Told":
        return cls()

    def begin(self, prompt: Sequence[int], passes: DraftPasses) -> "Told":
        self._passes = passes
        self._num_prompt = len(prompt)
        return self

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        self._passes.read([tokens[-1], 3])
        begin = len(tokens) - self._num_prompt
        return [
            token + (place % 3 == 2)
            for place, token in enumerate(self.answer[begin : begin + most], begin)
        ]

    def note(self, tokens: Sequence[int], output: object) -> None: ...

    def close(self) -> None: ...

    def receipt(self) -> dict[str, object]:
        return {}


@pytest.fixture(scope="module")
def opened(checkpoint: Checkpoint) -> Iterator[MoeModel]:
    opened = open_model(str(checkpoint("olmoe")))
    yield opened
    opened.store.close()


def said(session: Session, sampling: Sampling) -> list[tuple[int, object]]:
    return [(token.token_id, token.logprobs) for token in session.tokens(PROMPT, sampling)]


@pytest.fixture(scope="module")
def answer(opened: MoeModel) -> list[int]:
    with Session(opened, SETTINGS) as session:
        Told.answer = [token for token, _ in said(session, GREEDY)]
    return list(Told.answer)


@pytest.mark.parametrize("preset", ["on-demand", "near", "fmoe", "specmd"])
@pytest.mark.parametrize("draft", ["told:3", "ngram=1:4"])
def test_drafted_tokens_are_the_undrafted_ones(
    opened: MoeModel, answer: list[int], preset: str, draft: str
) -> None:
    learns = preset == "fmoe"
    with Session(opened, replace(SETTINGS, preset=preset, draft=draft, learn=learns)) as session:
        assert [token for token, _ in said(session, GREEDY)] == answer
        session.validate()
        effort = session.effort().counters
        drafting = session.receipt()["draft"]
        assert drafting["accepted"] == effort["accepted"] <= effort["drafted"]
        assert drafting["drafted"] == effort["drafted"] > 0
        assert drafting["ties"] == effort["ties"]
        assert (
            sum(of["passes"] for k, of in drafting["measured"]["1"].items() if k != "0")
            == (drafting["passes"])
        )
        if draft == "told:3":
            assert effort["accepted"] >= 4 and effort["accepted"] < effort["drafted"]


def test_the_seed_decides_with_drafts_too(opened: MoeModel, answer: list[int]) -> None:
    sampling = replace(GREEDY, temperature=1.0, seed=3)
    with Session(opened, SETTINGS) as session:
        expected = [token for token, _ in said(session, sampling)]
    Told.answer = expected
    with Session(opened, replace(SETTINGS, draft="told:3")) as session:
        assert [token for token, _ in said(session, sampling)] == expected
        assert session.num_passes < len(expected)
    Told.answer = answer


def test_an_answer_ends_within_drafts(
    opened: MoeModel, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened.model.generation_config, "eos_token_id", answer[7])
    end = answer.index(answer[7]) + 1
    with Session(opened, replace(SETTINGS, draft="told:8")) as session:
        assert [token for token, _ in said(session, Sampling(12))] == answer[:end]
        again = open_batch(session, rows=4)
        with again as batch:
            batch.add(PROMPT, Sampling(12))
            results = []
            while not batch.is_idle:
                results += batch.step()
        assert [result.token_id for result in results] == answer[:end]
        assert [result.is_over for result in results] == [False] * (end - 1) + [True]


def test_what_was_rejected_is_marked_and_never_used(
    opened: MoeModel, answer: list[int], tmp_path: Path
) -> None:
    rows = []
    uses = []
    reads = []
    for draft in ("none", "told:3"):
        settings = replace(SETTINGS, draft=draft, policies={"eviction": "lfu"})
        with Session(opened, settings) as session:
            recorder = session.record()
            said(session, GREEDY)
            num_tokens = session.controller.now.num_tokens
        write_parquet(recorder.trace(), tmp_path / "trace.parquet")
        trace = read_parquet(tmp_path / "trace.parquet")
        is_rejected = np.zeros(len(trace), bool) if trace.rejected is None else trace.rejected
        assert is_rejected.any() == (draft != "none")
        stays = trace.take(np.flatnonzero(~is_rejected))
        columns = (column.tolist() for column in (stays.token, stays.layer, stays.experts))
        rows.append(
            {(token, layer): experts for token, layer, experts in zip(*columns, strict=True)}
        )
        uses.append(session.parts.policies.eviction.uses.sum())
        reads.append((stays.layer == 0).sum())
        assert num_tokens == reads[-1]
    assert rows[1] == rows[0]
    # but for the prompt each use is one of a token that stays, some of which are read twice
    assert uses[1] - uses[0] == (reads[1] - reads[0]) * stays.num_layers * stays.top_k


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ngrm", "ngram"),
        ("ngram:0", "1 <= k <= 8"),
        ("none:3", "1 <= k <= 8"),
        ("told:9", "k <= 8"),
    ],
)
def test_a_wrong_choice_is_refused(text: str, line: str) -> None:
    with pytest.raises(BadUsage, match=line):
        Settings(draft=text)


def test_a_choice_has_an_argument_and_a_length() -> None:
    assert Draft.parse("model=/a:b/c:4") == Draft("model", "/a:b/c", 4)
    assert Draft.parse("ngram") == Draft("ngram")
    assert kind_of("told") is Told


def test_a_family_that_asks_for_the_last_logits_alone_gives_those_of_drafts() -> None:
    with opened_tiny("nemotron_h", torch.float32) as opened:
        with Session(opened, SETTINGS) as session:
            Told.answer = undrafted = [token for token, _ in said(session, GREEDY)]
        with Session(opened, replace(SETTINGS, draft="told:3")) as session:
            assert [token for token, _ in said(session, GREEDY)] == undrafted
            assert session.receipt()["draft"]["accepted"]
