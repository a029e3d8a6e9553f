"""The logits of a router ahead equal those of its own forward, in every family."""

import pytest
import torch

from runtime.engine.routers import RouterLogits
from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint
from tests.helpers.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_whole_router(checkpoint: Checkpoint, family: str) -> None:
    opened = open_model(str(checkpoint(family)))
    router, seen = opened.layers[-1].gate, []
    router.register_forward_hook(lambda gate, args, output: seen.append((args, output[0])))
    with Session(opened, Settings("full")) as session:
        for tokens in (5, 1, 1):
            session.forward(torch.arange(3, 3 + tokens)[None])
    gate = RouterLogits(router)
    assert len(seen) == 3
    with torch.inference_mode():
        for (x, *extra), logits in seen:
            assert torch.equal(gate.logits(x, tuple(extra)), logits)
