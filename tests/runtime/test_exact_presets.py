"""Differential: whatever loses nothing says what the plain model says, at every budget, prompt after prompt."""

import pytest
import torch

from runtime.model import open_model
from runtime.session import Session, Settings
from tests.conftest import Checkpoint
from tests.families import VOCABULARY
from tests.runtime.test_session import plain_model

AHEAD = "next_gate:distance=2,overfetch=0.5,through=yes"
CHOSEN = {
    **{name: (name, {}) for name in ("on-demand", "near", "mixtral-offloading", "moe-infinity", "specmd", "horizon")},
    "hot experts here, cold ones near": ("monde", {}),
    "some fetched": ("on-demand", {"prefetch": "next_gate", "eviction": "lfu", "miss": "qstar:ratio=0.5"}),
    "two layers ahead, some fetched": ("on-demand", {"prefetch": AHEAD, "eviction": "lcp", "miss": "qstar:ratio=0.2"}),
    "two layers ahead, lent": ("near", {"prefetch": AHEAD, "eviction": "horizon", "miss": "near:ratio=0.3,fill=no"}),
}
BUDGETS = ("one a layer", "25%", "50%")


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("name", CHOSEN)
def test_every_budget_gives_the_plain_models_logits(name: str, scope: str, checkpoint: Checkpoint) -> None:
    """Bit for bit, from a fast tier that the prompt before has left full."""
    folder = checkpoint("olmoe", "hub", "float32")
    plain, opened = plain_model(folder), open_model(str(folder))
    preset, policies = CHOSEN[name]
    prompts = torch.randint(3, VOCABULARY, (4, 3, 12), generator=torch.Generator().manual_seed(3))
    for budget in BUDGETS:
        least = f"{opened.shape.num_layers}x" if budget == BUDGETS[0] else budget
        paced = {"link": "300MB/s+5us", "near": "1GB/s", "window": "2KiB", "scope": scope}
        with Session(opened, Settings(preset, policies, budget=least, **paced)) as session, torch.inference_mode():
            for turn, prompt in enumerate(prompts):
                ids = prompt if turn % 2 else prompt[:1]
                ours, theirs = session.forward(ids), plain(ids, use_cache=True)
                assert torch.equal(ours.logits, theirs.logits), (budget, turn)
                for step in range(3):
                    one = ids[:, step : step + 1]
                    ahead = session.forward(one, past=ours.past_key_values).logits
                    assert torch.equal(ahead, plain(one, past_key_values=theirs.past_key_values).logits), (budget, turn)
                session.controller.cache.validate()
    opened.store.close()
