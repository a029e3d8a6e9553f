"""Operands with which the last kernel of a few tokens' experts adds them up."""

from typing import NamedTuple

import torch

MOST_TOKENS = 9  # of a pass that one graph can compute: a token and eight drafts


class Total(NamedTuple):
    """The experts `keys` [T, K] with their `weights` [T, K], contiguous, and the place of their
    sums, `out` [T, H].

    `done` [T * H] int32 counts programs by token and block of columns; it is zero before a kernel
    and again when the kernel has ended. Every share and sum is rounded to out's type, or,
    if `is_wide`, only the whole sum."""

    keys: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor
    done: torch.Tensor
    is_wide: bool
