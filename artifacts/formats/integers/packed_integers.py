"""compressed-tensors' `pack-quantized`: signed integers of 4 or 8 bits in 32-bit words along the
inputs, as Kimi-K2 has its experts.

`w[o, k] = scale[o, g] * (q[o, k] - 2^(bits-1) - z[o, g])` with the group `g = k // size`, or
`g_idx[k]` where activations order the columns. A stored zero-point is z + 2^(bits-1); symmetric
weights have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from artifacts.common.lazy_torch import torch
from artifacts.formats.base import (
    CONTRADICTED,
    DAMAGED,
    Described,
    Format,
    Loop,
    PlacedTensors,
    Stored,
    StoredZeros,
    fault_of_scales,
    is_number,
    loops,
    require,
    require_groups,
)
from artifacts.formats.codes import NO_ZEROS, unpack
from artifacts.formats.integers.order import INDEX, ORDER, fault_of_index, placed, require_index
from artifacts.formats.schemes import WHOLE, Scheme, Spelling, flag, group_size, number

_NAMES = {
    "packed": "_packed",
    "scale": "_scale",
    "zero_point": "_zero_point",
    "g_idx": "_g_idx",
    "size": "_shape",
}
_CODES = np.arange(16, dtype=np.float32)
_SYMMETRIC = _CODES - 8


@dataclass(frozen=True, slots=True)
class PackedIntegers(Format):
    """`packed` int32 [out, in * bits / 32], `scale` [out, groups]; optional are `zero_point` int32
    [out * bits / 32, groups], `g_idx` [in], in a slot `order`, and `size` int64 [2], which repeats
    the shape."""

    name: str = "pack-quantized"
    bits: int = 4
    group_size: int | None = None  # as the config says, 0 for one group
    has_zeros: bool = False  # `symmetric` is false
    is_permuted: bool = False  # `actorder` is group
    is_symmetric: bool = False  # `symmetric` is true: every zero-point, if any are stored, is 0

    lacking: ClassVar[int] = -1
    """Number at every input of an index that says nothing."""

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        packed = stored["packed"]
        scale = stored["scale"]
        require(packed.dtype is torch.int32, f"codes of {packed.dtype}")
        require(is_number(scale.dtype), f"scales of {scale.dtype}")
        require(
            len(packed.shape) == len(scale.shape) == 2 and 0 not in packed.shape,
            "tensors that are no matrices",
        )
        num_outputs = packed.shape[0]
        num_inputs = packed.shape[1] * 32 // self.bits
        require(scale.shape[0] == num_outputs, f"{scale.shape[0]} scales of {num_outputs} outputs")
        num_groups = scale.shape[1]
        require(
            bool(num_groups) and num_inputs % num_groups == 0,
            f"{num_groups} groups of {num_inputs} inputs",
        )
        points = stored.get("zero_point")
        words = -(-num_outputs * self.bits // 32)
        require(
            points is None or points.shape == (words, num_groups), "zero-points of other groups"
        )
        point_type = torch.int32 if points is None else points.dtype
        require(point_type in (torch.int32, torch.int64), f"zero-points of {point_type}")
        require(
            "size" not in stored or stored["size"].shape == (2,),
            "a weight_shape that is not of two numbers",
        )
        is_indexed = require_index(stored, num_inputs, num_groups)
        require_groups(num_groups, num_inputs, self.group_size, is_indexed=is_indexed)
        require(
            points is not None or not self.has_zeros,
            "not symmetric, and the zero-points are missing",
        )
        require(is_indexed or not self.is_permuted, "actorder is group, and g_idx is missing")
        return num_outputs, num_inputs

    def dequantise(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        packed = tensors["packed"]
        scale = tensors["scale"].float()
        num_inputs = packed.shape[1] * 32 // self.bits
        group, place, _, is_moved = placed(tensors, num_inputs, scale.shape[1], self.lacking)
        zeros = self._zeros(tensors).expand(scale.shape)
        matrix = (unpack(packed, self.bits, num_inputs) - zeros[:, group]).float() * scale[:, group]
        return matrix[:, place] if is_moved else matrix

    def loop(self, tensors: Mapping[str, torch.Tensor]) -> Loop | None:
        packed = tensors["packed"]
        scales = tensors["scale"].float().numpy()
        if self.bits == 4 and not {"zero_point", ORDER, INDEX} & tensors.keys():
            return partial(
                loops().from_half_bytes,
                packed.view(torch.uint8).numpy(),
                _SYMMETRIC,
                NO_ZEROS,
                scales,
            )
        zeros = self._zeros(tensors).expand(scales.shape).float().contiguous().numpy()
        num_inputs = packed.shape[1] * 32 // self.bits
        groups, places, are_even, are_moved = placed(
            tensors, num_inputs, scales.shape[1], self.lacking
        )
        if not are_even:
            own = (packed.numpy(), self.bits, zeros, scales, groups.numpy())
            fill = partial(loops().from_ordered_integers, *own)
        elif self.bits == 8:
            fill = partial(loops().from_integers, packed.view(torch.uint8).numpy(), zeros, scales)
        else:
            own = (packed.view(torch.uint8).numpy(), _CODES, zeros, scales)
            fill = partial(loops().from_half_bytes, *own)
        return partial(_in_places, fill, places.numpy().astype(np.uint32)) if are_moved else fill

    def described(self, tensors: PlacedTensors) -> Described:
        zeros = None
        if "zero_point" in tensors.placed:
            num_words, num_groups = tensors.shape("zero_point")
            zeros = StoredZeros(tensors.start("zero_point"), num_words, num_groups, 1)
        codes = tensors.codes("packed", "integer", self.bits)
        return Described(codes, tensors.scales("scale"), zeros)

    def fault(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        packed = tensors["packed"]
        scale = tensors["scale"]
        size = tensors.get("size")
        stored = [len(packed), packed.shape[1] * 32 // self.bits]
        if size is not None and size.tolist() != stored:
            return f"a matrix {stored} whose weight_shape says {size.tolist()}, {DAMAGED}"
        fault = fault_of_index(tensors, stored[1], scale.shape[1], self.group_size, self.lacking)
        fault = fault or fault_of_scales(scale, 2**self.bits - 1)
        if (
            fault is None
            and self.is_symmetric
            and bool((self._zeros(tensors) != 1 << self.bits - 1).any())
        ):
            return f"zero-points, and config.json says that it is symmetric: {CONTRADICTED}"
        return fault

    def row_heights(self, stored: Mapping[str, Stored]) -> Mapping[str, int] | None:
        is_plain = stored.keys() <= {"packed", "scale", "size"}
        return {"packed": 1, "scale": 1} if is_plain else None

    def _zeros(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The zero-points, int32 [out, groups], or [1, 1] for symmetric weights."""
        points = tensors.get("zero_point")
        if points is None:
            return torch.full(
                (1, 1), 1 << self.bits - 1, dtype=torch.int32, device=tensors["packed"].device
            )
        return unpack(points.T, self.bits, len(tensors["packed"])).T


def _in_places(fill: Loop, places: np.ndarray, first: int, panel: np.ndarray) -> None:
    fill(first, panel)
    loops().take_places(places, panel)


def scheme(layout: str, weights: Mapping) -> Scheme:
    """The scheme of compressed-tensors' weights as their config says."""
    bits = number("num_bits", weights.get("num_bits"), (4, 8))
    size = group_size(weights, WHOLE)
    is_ordered = str(weights.get("actorder")).lower() == "group"
    is_symmetric = flag(weights, "symmetric")
    has_zeros = is_symmetric is False
    form = PackedIntegers(
        bits=bits,
        group_size=size,
        has_zeros=has_zeros,
        is_permuted=is_ordered,
        is_symmetric=is_symmetric is True,
    )
    return Scheme(layout, bits, (1, size), 2, (Spelling(form, _NAMES),), has_zeros, is_ordered)
