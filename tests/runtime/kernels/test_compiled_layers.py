"""All layers in one call give the bits and the counts of layers that are called one after
another."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from runtime.control.plan import Plan
from runtime.model.open import open_model
from runtime.policies.base import Artefacts
from runtime.session.session import Session, Settings
from runtime.session.settings import FUSED
from tests.conftest import Checkpoint
from tools.gpu.checks.made_replicas import made

pytestmark = pytest.mark.slow

_NUM_DECODED = 24


@torch.inference_mode()
def _decoded(
    session: Session, *, is_whole: bool = True
) -> tuple[torch.Tensor, dict[str, int], list, list[list[int]]]:
    """Logits, counts, keys and what is noted of the last token, after a prompt of one token so that
    experts are absent at first."""
    if not is_whole:
        session.parts.dense.uninstall()
        session.parts.dense.install()
    ids = torch.randint(3, 90, (1, 1 + _NUM_DECODED), generator=torch.Generator().manual_seed(3))
    past = None
    logits = []
    for place in range(ids.shape[1]):
        output = session.forward(ids[:, place : place + 1], past=past)
        past = output.past_key_values
        logits.append(output.logits)
    last = [
        done.selected if isinstance(done, Plan) else done
        for _, done in sorted(session.engine.steps.last_token.items())
    ]
    noted = [ids.tolist() for ids in last]
    return (
        torch.cat(logits),
        session.controller.counters.totals(),
        [layer.keys for layer in past.layers],
        noted,
    )


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("olmoe", "bfloat16"), ("olmoe", "float32"), ("qwen2_moe", "float32")],
    ids=str,
)
def test_one_call_agrees_with_calls_of_layers(
    family: str, dtype: str, checkpoint: Checkpoint
) -> None:
    """Layers of qwen2_moe have shared experts besides: they are not taken."""
    folder = str(checkpoint(family, "hub", dtype))
    found = []
    for is_whole in (True, False):
        with Session.open(folder, Settings("full", experts=FUSED)) as session:
            assert session.receipt()["compiled"]["whole"] == (family == "olmoe")
            found.append(_decoded(session, is_whole=is_whole))
    (ours, *counted), (theirs, *expected) = found
    assert torch.equal(ours, theirs)
    assert counted[0] == expected[0] and counted[0]["misses"] > 0 and counted[2] == expected[2]
    assert all(map(torch.equal, counted[1], expected[1]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_replicas_that_stay_are_one_call_too(
    dtype: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """It agrees with calls of layers, and with steps that the controller decides."""
    opened = open_model(str(checkpoint("olmoe", "hub", dtype)))
    found = []
    artefacts = Artefacts(replicas=made(opened, tmp_path, is_coded=True))
    settings = Settings("shadow", {"residency": "shadow:slots=no"}, "45%", experts=FUSED)
    for way in ("whole", "layers", "decided"):
        with Session(opened, settings, artefacts=artefacts) as session:
            assert session.controller.holds_low
            session.watcher.on_step = (lambda step: None) if way == "decided" else None
            decided = Mock(wraps=session.controller.step)
            session.controller.step = decided
            found.append(_decoded(session, is_whole=way == "whole"))
            assert decided.call_count == (
                (1 + _NUM_DECODED) * opened.shape.num_layers if way == "decided" else 0
            )
    (ours, counts, keys, noted), layers, decided = found
    assert torch.equal(ours, layers[0]) and all(map(torch.equal, keys, layers[2]))
    assert (ours - decided[0]).abs().max() <= (
        0 if dtype == "bfloat16" else 1e-5 * ours.abs().max()
    )
    assert counts == layers[1] == decided[1] and noted == layers[3] == decided[3]
    assert counts["low"] == counts["requests"]
    opened.store.close()
