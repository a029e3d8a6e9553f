"""NVFP4: 4-bit floats with an 8-bit scale for each 16 weights and one scale for the matrix.

`w[o, k] = e2m1(packed[o, k // 2]) * scale[o, k // 16] * g`, where modelopt stores g itself
(`weight_scale_2`) and compressed-tensors its inverse (`weight_global_scale`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from artifacts.common.lazy_torch import torch
from artifacts.formats.base import (
    DAMAGED,
    NOT_FINITE,
    Described,
    Format,
    Loop,
    PlacedTensors,
    Stored,
    are_sound,
    fault_of_scales,
    loops,
    require,
)
from artifacts.formats.codes import E2M1, E2M1_BITS, NO_ZEROS, floats
from artifacts.formats.schemes import Scheme, Spelling

GROUP = 16


@dataclass(frozen=True, slots=True)
class NvFp4(Format):
    """`packed` uint8 [out, in / 2], `scale` e4m3 [out, in / 16], `global` float32 of one number."""

    name: str = "nvfp4"
    is_inverse: bool = False

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        packed = stored["packed"]
        scale = stored["scale"]
        matrix = stored["global"]
        types = packed.dtype, scale.dtype, matrix.dtype
        require(types == (torch.uint8, torch.float8_e4m3fn, torch.float32), f"tensors of {types}")
        require(prod(matrix.shape) == 1, f"{prod(matrix.shape)} scales of the matrix")
        require(
            len(scale.shape) == 2 and 0 not in scale.shape, f"scales of shape {list(scale.shape)}"
        )
        num_outputs, num_groups = scale.shape
        fit = (num_outputs, num_groups * GROUP // 2)
        require(
            packed.shape == fit,
            f"weights {list(packed.shape)} do not fit scales {list(scale.shape)}",
        )
        return num_outputs, num_groups * GROUP

    def dequantise(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        numbers = floats(tensors["packed"]).unflatten(1, (-1, GROUP))
        return (numbers * self._scales(tensors)[..., None]).flatten(1)

    def loop(self, tensors: Mapping[str, torch.Tensor]) -> Loop | None:
        stored = tensors["scale"].view(torch.uint8).numpy()
        codes = torch.arange(256, dtype=torch.uint8).view(tensors["scale"].dtype)[None]
        of_codes = self._scales(tensors | {"scale": codes})
        scales = np.empty(stored.shape, np.float32)
        loops().from_bytes(
            stored, of_codes[0].numpy(), np.ones((1, 1), np.float32), *stored.shape, 0, scales
        )
        values = np.array(E2M1, np.float32)
        return partial(loops().from_half_bytes, tensors["packed"].numpy(), values, NO_ZEROS, scales)

    def fault(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        matrix = tensors["global"]
        scale = tensors["scale"]
        if not are_sound((matrix, scale)):
            return NOT_FINITE
        if float(matrix) <= 0:
            return f"a scale of the matrix of {float(matrix):g}, {DAMAGED}"
        codes = scale.view(torch.int8)  # whose sign is that of the float
        if int(codes.min()) < 0:
            return f"a negative scale, {DAMAGED}"
        largest = codes.max().view(scale.dtype)
        return fault_of_scales(self._scales({"global": matrix, "scale": largest}), max(E2M1))

    def described(self, tensors: PlacedTensors) -> Described:
        matrix = tensors.start("global")
        return Described(
            tensors.codes("packed", "float", 4, "rows", *E2M1_BITS),
            tensors.scales("scale", matrix=matrix, is_inverse=self.is_inverse),
        )

    def row_heights(self, stored: Mapping[str, Stored]) -> Mapping[str, int]:
        return {"packed": 1, "scale": 1, "global": stored["packed"].shape[0]}

    def _scales(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The scale of each group, float32 [out, in / 16], or of each of some codes of scales
        [1, n]. Rows of several matrices have a scale of the matrix each."""
        matrix = tensors["global"].reshape(-1, 1)
        scale = tensors["scale"].float()
        return scale / matrix if self.is_inverse else scale * matrix


def scheme(layout: str, packed: str, matrix: str, *, is_inverse: bool) -> Scheme:
    """The scheme, by the endings of the names of codes and of the scale of a matrix."""
    roles = {"packed": packed, "scale": "_scale", "global": matrix}
    spelling = Spelling(NvFp4(is_inverse=is_inverse), roles)
    return Scheme(layout, 4, (1, GROUP), 1, (spelling,))
