"""A model whose routers cannot be asked ahead runs without predictions, and says so."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from artifacts.errors import BadInput, BadUsage
from profilers.routing.predictors import observe_inputs
from profilers.text.batches import Batching
from runtime.model.open import MoeModel
from runtime.session.session import Session, Settings

REASON = "routers of olmoe cannot be asked ahead: only their own layer knows their state"


@pytest.fixture
def told(opened: MoeModel) -> Iterator[MoeModel]:
    """A model in which each layer tells the next one's router something."""
    layer = opened.layers[-1]
    block = opened.model.get_submodule(layer.name.rpartition(".")[0])
    own = layer.gate.__class__, block.__class__

    class Router(own[0]):
        def forward(
            self, x: torch.Tensor, state: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, ...]:
            return super().forward(x if state is None else x + state)

    class Block(own[1]):
        def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x)

    layer.gate.__class__ = Router
    block.__class__ = Block
    yield opened
    layer.gate.__class__, block.__class__ = own


def test_nothing_is_prefetched_and_the_receipt_says_why(told: MoeModel) -> None:
    with Session(told, Settings("mixtral-offloading", budget="50%")) as session:
        session.watcher.see_predictions(1)
        steps = session.record()
        session.forward(torch.arange(3, 8)[None])
        assert steps.trace().predicted is None
        assert session.receipt()["policies"]["prefetch"] == "none"
        assert session.fallbacks[0] == f"--prefetch none instead of next_gate: {REASON}"


def test_what_cannot_do_without_predictions_is_refused(told: MoeModel) -> None:
    with pytest.raises(BadUsage, match=f"--routing pre_gated follows predictions: {REASON}"):
        Session(told, Settings("pre-gated", budget="50%"))
    with Session(told, Settings(budget="50%")) as session, pytest.raises(BadInput, match=REASON):
        next(
            observe_inputs(
                session, Batching(batch=1, length=8, prefill=0).batches([np.arange(3, 9)]), 1
            )
        )
