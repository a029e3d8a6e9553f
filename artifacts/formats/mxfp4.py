"""MXFP4: 4-bit floats with one power of two for each 32 weights (OCP Microscaling 1.0), as gpt-oss
has its experts.

`w[o, 32 g + i] = e2m1(blocks[o, g, i // 2]) * 2 ** (scales[o, g] - 127)`, the even one of two in
the low half of a byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from artifacts.common.lazy_torch import torch
from artifacts.formats.base import (
    Described,
    Format,
    Loop,
    PlacedTensors,
    Stored,
    fault_of_scales,
    loops,
    require,
)
from artifacts.formats.codes import E2M1, E2M1_BITS, NO_ZEROS, floats
from artifacts.formats.modules import REGEX
from artifacts.formats.schemes import HEAD, Group, Said, Scheme, Spelling, patterns

GROUP = 32
# of a scale, which is an exponent (e8m0)
_BIAS = 127
_NAN = 255


@dataclass(frozen=True, slots=True)
class MxFp4(Format):
    """`blocks` uint8 [out, in / 32, 16] or [out, in / 2], `scales` uint8 [out, in / 32]."""

    name: str = "mxfp4"

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        blocks = stored["blocks"]
        scales = stored["scales"]
        require(
            blocks.dtype is torch.uint8 and scales.dtype in (torch.uint8, torch.float8_e8m0fnu),
            f"{blocks.dtype} with {scales.dtype}",
        )
        require(
            len(scales.shape) == 2 and 0 not in scales.shape,
            f"scales of shape {list(scales.shape)}",
        )
        num_outputs, num_groups = scales.shape
        fits = ((num_outputs, num_groups, GROUP // 2), (num_outputs, num_groups * GROUP // 2))
        require(
            blocks.shape in fits,
            f"blocks {list(blocks.shape)} do not fit scales {list(scales.shape)}",
        )
        return num_outputs, num_groups * GROUP

    def dequantise(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        scales = tensors["scales"].view(torch.uint8)
        numbers = floats(tensors["blocks"].reshape(*scales.shape, GROUP // 2))
        return torch.ldexp(numbers, scales.int()[..., None] - _BIAS).flatten(1)

    def loop(self, tensors: Mapping[str, torch.Tensor]) -> Loop | None:
        scales = tensors["scales"].view(torch.float8_e8m0fnu).float()
        codes = tensors["blocks"].reshape(len(scales), -1).numpy()
        return partial(
            loops().from_half_bytes, codes, np.array(E2M1, np.float32), NO_ZEROS, scales.numpy()
        )

    def fault(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        largest = tensors["scales"].view(torch.uint8).max()  # of exponents, as that of numbers
        return fault_of_scales(largest.view(torch.float8_e8m0fnu), max(E2M1))

    def described(self, tensors: PlacedTensors) -> Described:
        codes = tensors.codes("blocks", "float", 4, "rows", *E2M1_BITS)
        return Described(codes, tensors.scales("scales"))

    def row_heights(self, stored: Mapping[str, Stored]) -> Mapping[str, int]:
        return {"blocks": 1, "scales": 1}


def said(config: Mapping) -> Said:
    """Read the config of a checkpoint in MXFP4."""
    group = Group(scheme("mxfp4", "_blocks", "_scales"), (f"{REGEX}.*experts",))
    return Said((group,), patterns(config, "modules_to_not_convert") + HEAD)


def scheme(layout: str, blocks: str, scales: str) -> Scheme:
    """The scheme, by the endings of names."""
    spelling = Spelling(MxFp4(), {"blocks": blocks, "scales": scales})
    return Scheme(layout, 4, (1, GROUP), 1, (spelling,))
