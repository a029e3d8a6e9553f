"""A pass over a few tokens of one sequence gives each of them the bits of a pass of its own."""

import pytest
import torch

from runtime.kernels.cpu.dense import MOST_TOKENS
from runtime.session.session import Session, Settings
from runtime.session.settings import FUSED
from tests.conftest import Checkpoint

_NUM_PROMPT = 5
_WIDTHS = (2, 3, 4, 5, 8, MOST_TOKENS)


def _ids(num_tokens: int) -> torch.Tensor:
    return torch.randint(3, 90, (1, num_tokens), generator=torch.Generator().manual_seed(3))


@torch.inference_mode()
def _passes(session: Session, widths: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits [T, V] of passes of these widths behind a prompt, and the cache."""
    ids = _ids(_NUM_PROMPT + sum(widths))
    past = session.forward(ids[:, :_NUM_PROMPT]).past_key_values
    logits = []
    place = _NUM_PROMPT
    for width in widths:
        output = session.forward(ids[:, place : place + width], past=past)
        logits.append(output.logits[0])
        place += width
    return torch.cat(logits), [each for own in past.layers for each in (own.keys, own.values)]


def _assert_same_bits(session: Session, *, is_exact: bool) -> None:
    """In float32 sums may be taken in another order, by torch, or where one token is one call:
    drafts settle ties there."""
    one_by_one, cached = _passes(session, (1,) * sum(_WIDTHS))
    together, also = _passes(session, _WIDTHS)
    if is_exact:
        assert torch.equal(together, one_by_one) and all(map(torch.equal, also, cached))
    else:
        torch.testing.assert_close([together, *also], [one_by_one, *cached])


@pytest.mark.parametrize("budget", ["100%", "50%"])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("olmoe", "bfloat16"),
        *(
            pytest.param(family, dtype, marks=pytest.mark.slow)
            for family in ("olmoe", "qwen2_moe", "qwen3_moe", "mixtral")
            for dtype in ("bfloat16", "float16", "float32")
            if (family, dtype) != ("olmoe", "bfloat16")
        ),
    ],
)
def test_each_token_has_its_own_bits(
    family: str, dtype: str, budget: str, checkpoint: Checkpoint
) -> None:
    """Where all layers are one call, where experts come and go, and beside shared experts."""
    settings = (
        Settings("full", experts=FUSED)
        if budget == "100%"
        else Settings(budget=budget, experts=FUSED)
    )
    with Session.open(str(checkpoint(family, "hub", dtype)), settings) as session:
        keeps_order = (family, budget) == ("mixtral", "50%")  # with windows
        _assert_same_bits(session, is_exact=keeps_order or dtype != "float32")
