"""Drafts by the experts that are there: nothing is loaded for them, and answers stay the same."""

from pathlib import Path

import pytest
import torch

from runtime.control.counters import Counter
from runtime.drafters import greedy
from runtime.engine.fixed_past import twin_of
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings
from tools.gpu.checks.made_replicas import made

PROMPT = torch.arange(3, 15)[None]
SAMPLING = Sampling(max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def artefacts(opened: MoeModel, tmp_path_factory: pytest.TempPathFactory) -> Artefacts:
    return Artefacts(replicas=made(opened, tmp_path_factory.mktemp("replicas")))


def answer(
    opened: MoeModel, artefacts: Artefacts, draft: str, **policies: str
) -> tuple[list[int], Session]:
    settings = Settings(
        "on-demand", policies, "50%", link="1GB/s", draft=draft, threads=1, window="1KiB"
    )
    with Session(opened, settings, artefacts=artefacts) as session:
        tokens = [token.token_id for token in session.tokens(PROMPT, SAMPLING)]
        session.validate()
        return tokens, session


@pytest.mark.parametrize("draft", ["resident:3", "auto"])
@pytest.mark.parametrize("policies", [{}, {"residency": "shadow:bits=1"}])
def test_answers_are_those_without_drafts(
    opened: MoeModel,
    artefacts: Artefacts,
    monkeypatch: pytest.MonkeyPatch,
    draft: str,
    policies: dict[str, str],
) -> None:
    """Beside replicas too: they stand in for absent experts in drafts, and never in the answer."""
    monkeypatch.setattr(greedy, "SURE", 0.0)
    plain, _ = answer(opened, artefacts, "none", **policies)
    drafted, session = answer(opened, artefacts, draft, **policies)
    assert drafted == plain
    said = session.receipt()["draft"]
    assert said["drafter"] == draft.partition(":")[0]
    if draft != "auto":
        counts = session.controller.counters.sum().sum(axis=1)
        assert said["drafted"] > 0
        assert counts[Counter.DRAFTED] == said["drafted"]


@pytest.mark.parametrize(
    "policies",
    [{}, {"residency": "shadow:bits=2"}, {"miss": "fetch_priority:bits=2,percentile=60"}],
    ids=["left out", "replicas", "replicas in slots"],
)
def test_a_draft_is_one_compiled_call_over_what_is_there(
    opened: MoeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policies: dict[str, str],
) -> None:
    artefacts = Artefacts(replicas=made(opened, tmp_path, is_coded=True))
    settings = Settings("on-demand", policies, "50%", draft="resident", threads=1, window="1KiB")
    with Session(opened, settings, artefacts=artefacts) as session:
        engine = session.engine
        past = session.forward(PROMPT).past_key_values
        counts = session.controller.counters.sum().copy()
        absent = sum(place is None for place in session.controller.cache.places)
        low = sum(
            place is not None and place.bits == 2 for place in session.controller.cache.places
        )

        def drafted() -> torch.Tensor:
            with engine.drafting(), torch.inference_mode():
                return opened.model(
                    input_ids=PROMPT[:, :1], past_key_values=twin_of(past), use_cache=True
                ).logits

        with monkeypatch.context() as planned:
            planned.setattr(engine, "_drafts", None)
            expected = drafted()
        monkeypatch.setattr(engine.steps, "_run_present", None)
        ours = drafted()
        session.validate()
    assert absent and bool(low) == ("miss" in policies)
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (session.controller.counters.sum() == counts).all()
