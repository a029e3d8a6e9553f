"""Codes of few bits: unpacking of words and bytes, and the values of 4-bit floats."""

from __future__ import annotations

import numpy as np

from artifacts.common.lazy_torch import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number of each code of a 4-bit float: sign, two bits of exponent, one of mantissa (OCP
Microscaling, table 5)."""

E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice these numbers as ggml has them, without a negative zero."""

E2M1_BITS = (1, 1)
"""Of these floats the bits of the mantissa and the exponent's bias."""

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The number of each code of ggml's IQ4_NL and IQ4_XS (kvalues_iq4nl in ggml-common.h)."""

NO_ZEROS = np.empty((0, 0), np.float32)
"""The zero-points of a format that has none, for compiled loops."""


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first `count` codes of each row of `words` int32 [n, w], a little-endian stream: int32
    [n, count]."""
    starts = torch.arange(count, device=words.device) * bits
    index = starts // 32
    shift = starts % 32
    wide = words.long() & 0xFFFFFFFF
    codes = wide[:, index] >> shift
    following = wide[:, (index + 1).clamp(max=words.shape[1] - 1)] << (32 - shift)
    return ((codes | torch.where(shift + bits > 32, following, 0)) & (2**bits - 1)).int()


def floats(packed: torch.Tensor) -> torch.Tensor:
    """The numbers of 4-bit floats in bytes [..., n], the first in the low half: float32 [...,
    2n]."""
    values = torch.tensor(E2M1, device=packed.device)
    halves = torch.stack((packed & 0xF, packed >> 4), dim=-1)
    return values[halves.int()].flatten(-2)
