"""Operands with which the last kernel of a token's experts adds them up."""

from typing import NamedTuple

import torch


class Total(NamedTuple):
    """The experts `keys` [1, K] with their `weights` [1, K], contiguous, and the place of their
    sum, `out` [1, H].

    `done` [H] int32 counts programs by block of columns; it is zero before a kernel and again when
    the kernel has ended. Every share and sum is rounded to out's type, or, if `is_wide`, only the
    whole sum."""

    keys: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor
    done: torch.Tensor
    is_wide: bool
