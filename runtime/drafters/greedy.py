"""The most probable continuation by one model, token after token, as far as it is sure."""

from collections.abc import Callable

import torch

SURE = 0.3
"""The least probability of a token that is worth verifying."""


def drafted(logits: torch.Tensor, read: Callable[[int], torch.Tensor], most: int) -> list[int]:
    """Return at most `most` tokens, each the most probable by `logits` [V] or by what `read` gives
    behind the one before, up to the first of which the model is not `SURE`."""
    drafts: list[int] = []
    while len(drafts) < most:
        chance, token = logits.float().softmax(-1).max(-1)
        if float(chance) < SURE:
            break
        drafts.append(int(token))
        if len(drafts) < most:
            logits = read(drafts[-1])
    return drafts
