"""A backend of another package computes a live run, as its receipt says."""

import pytest
import torch

from runtime.backends import choose
from runtime.backends.torch_backend import TorchBackend
from runtime.kernels.cpu.threads import KernelThreads
from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session
from runtime.session.settings import EXACT, FUSED, Settings
from runtime.tiers.fast import ResidentExperts
from tests.conftest import Checkpoint


class Eager(TorchBackend):
    """Another package's backend: torch, one expert after another."""

    name = "fused, eager"

    def __init__(self, opened: MoeModel, resident: ResidentExperts, threads: KernelThreads) -> None:
        super().__init__(resident, None, None, sum_dtype=opened.sum_dtype)

    @staticmethod
    def suits(opened: MoeModel, *, has_replicas: bool = False) -> bool:
        return not has_replicas


def logits(opened: MoeModel, experts: str) -> tuple[torch.Tensor, str]:
    """Logits of a prompt and of two tokens after it, and who computed a token's experts."""
    with Session(opened, Settings("near", budget="50%", experts=experts)) as session:
        ids = torch.arange(3, 12)[None]
        out = session.forward(ids)
        pieces = [out.logits]
        for token in (12, 13):
            out = session.forward(torch.tensor([[token]]), past=out.past_key_values)
            pieces.append(out.logits)
        return torch.cat(pieces, dim=1), session.receipt()["experts_of_a_token"]


def test_a_backend_from_outside_runs_live(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    exact, _ = logits(opened, EXACT)
    monkeypatch.setattr(choose, "_registered", [Eager])
    theirs, by = logits(opened, FUSED)
    assert by == Eager.name
    assert torch.allclose(theirs, exact, rtol=1e-5, atol=1e-6)
    opened.store.close()
