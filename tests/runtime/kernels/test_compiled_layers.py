"""All layers in one call give the bits and the counts of layers that are called one after another."""

import pytest
import torch

from runtime.session.session import Session, Settings
from runtime.session.settings import FUSED
from tests.conftest import Checkpoint

_NUM_DECODED = 24


@torch.inference_mode()
def _decoded(session: Session, *, is_whole: bool) -> tuple[torch.Tensor, dict[str, int], list, list[list[int]]]:
    """Logits, counts, keys and what is noted of the last token, after a prompt of one token so that experts are absent
    at first."""
    if not is_whole:
        session.parts.dense.uninstall()
        session.parts.dense.install()
    ids = torch.randint(3, 90, (1, 1 + _NUM_DECODED), generator=torch.Generator().manual_seed(3))
    past, logits = None, []
    for place in range(ids.shape[1]):
        output = session.forward(ids[:, place : place + 1], past=past)
        past = output.past_key_values
        logits.append(output.logits)
    noted = [ids.tolist() for _, ids in sorted(session.engine.steps.last_token.items())]
    return torch.cat(logits), session.controller.counters.totals(), [layer.keys for layer in past.layers], noted


@pytest.mark.parametrize(
    ("family", "dtype"), [("olmoe", "bfloat16"), ("olmoe", "float32"), ("qwen2_moe", "float32")], ids=str
)
def test_one_call_agrees_with_calls_of_layers(family: str, dtype: str, checkpoint: Checkpoint) -> None:
    """Layers of qwen2_moe have shared experts besides: they are not taken."""
    folder, found = str(checkpoint(family, "hub", dtype)), []
    for is_whole in (True, False):
        with Session.open(folder, Settings("full", experts=FUSED)) as session:
            assert session.receipt()["compiled"]["whole"] == (family == "olmoe")
            found.append(_decoded(session, is_whole=is_whole))
    (ours, *counted), (theirs, *expected) = found
    assert torch.equal(ours, theirs)
    assert counted[0] == expected[0] and counted[0]["misses"] > 0 and counted[2] == expected[2]
    assert all(map(torch.equal, counted[1], expected[1]))
