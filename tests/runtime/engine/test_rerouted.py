"""Selections and weights that a routing or a miss policy decides reach the model's experts."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from runtime.model.open import open_model
from runtime.policies import POLICIES
from runtime.policies.base import Simple, Step
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint
from tests.helpers.families import VOCABULARY


@dataclass
class Rewritten(Simple):
    """The router's choice with ranks in reverse order and weights times `scale`."""

    reroutes: ClassVar[bool] = True

    scale: float = 1.0

    def route(self, step: Step, resident: np.ndarray) -> Step:
        return replace(
            step, selected=step.selected[:, ::-1].copy(), weights=step.weights[:, ::-1] * self.scale
        )


def run(
    folder: str, routing: str, budget: str = "50%"
) -> tuple[torch.Tensor, list[int], dict[str, int]]:
    """Logits of a padded batch, greedy tokens after a prompt, and the counters."""
    ids = torch.randint(3, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :1] = 0
    with Session(
        open_model(folder), Settings(policies={"routing": routing}, budget=budget)
    ) as session:
        logits = session.forward(ids, mask=mask).logits[mask.bool()].float()
        tokens = [
            token.token_id for token in session.tokens(ids[1:2], Sampling(6, ignore_eos=True))
        ]
        return logits, tokens, session.controller.counters.totals()


@pytest.fixture(autouse=True)
def rewritten_is_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES["routing"], "rewritten", Rewritten)


@pytest.mark.parametrize("family", ["olmoe", "mixtral"])
@pytest.mark.parametrize("budget", ["50%", "100%"])
def test_the_order_of_ranks_changes_no_bit(
    family: str, budget: str, checkpoint: Checkpoint
) -> None:
    logits, tokens, totals = run(str(checkpoint(family)), "standard", budget)
    again, same, _ = run(str(checkpoint(family)), "rewritten", budget)
    assert torch.equal(again, logits) and same == tokens
    assert totals["replaced_ranks"] == 0


def test_new_weights_are_applied(checkpoint: Checkpoint) -> None:
    logits, _, _ = run(str(checkpoint("olmoe")), "standard")
    louder, _, _ = run(str(checkpoint("olmoe")), "rewritten:scale=2")
    assert (louder - logits).abs().max() > 1e-3 * logits.abs().max()


def test_cache_aware_without_strength_is_standard(checkpoint: Checkpoint) -> None:
    logits, tokens, _ = run(str(checkpoint("olmoe")), "standard")
    again, same, totals = run(str(checkpoint("olmoe")), "cache_aware:strength=0")
    assert torch.equal(again, logits) and same == tokens
    assert totals["replaced_ranks"] == 0


def test_cache_aware_misses_less_and_counts_its_replacements(checkpoint: Checkpoint) -> None:
    _, _, totals = run(str(checkpoint("olmoe")), "standard", "25%")
    _, _, fewer = run(str(checkpoint("olmoe")), "cache_aware:strength=1", "25%")
    assert fewer["misses"] < totals["misses"] and fewer["replaced_ranks"] > 0
