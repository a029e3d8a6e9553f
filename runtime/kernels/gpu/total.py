"""What the last kernel of a token's experts needs to add them up."""

from typing import NamedTuple

import torch


class Total(NamedTuple):
    """The experts `keys` [1, K] with their `weights` [1, K], contiguous, and where their sum goes,
    `out` [1, H].

    `done` [H] int32 counts programs by block of columns: zeros, as they are again when the kernel
    has ended. Every share and sum is rounded to out's type, or, if `is_wide`, only the whole
    sum."""

    keys: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor
    done: torch.Tensor
    is_wide: bool
