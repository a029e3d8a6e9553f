"""AWQ: 4-bit codes, eight outputs in a word and these in the order in which its kernels (`gemm`)
take them.

`w[o, k] = scales[k // g, o] * (q[k, o] - z[k // g, o])`; output 8 n + ORDER[i] has bits 4 i to 4 i
+ 3 of word n.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch

from artifacts.formats.base import (
    CONTRADICTED,
    Loop,
    Stored,
    fault_of_scales,
    is_number,
    loops,
    require,
    require_groups,
)
from artifacts.formats.codes import unpack

_BITS = 4
_MIDDLE = 1 << _BITS - 1
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PER_WORD = len(ORDER)


@dataclass(frozen=True, slots=True)
class Awq:
    """`qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8], `scales` [groups, out]."""

    fills_bfloat16: ClassVar[bool] = True

    name: str = "awq"
    group_size: int | None = None  # as the config says, 0 for one group
    # `zero_point` is false: every zero-point is in the middle of the codes
    is_symmetric: bool = False

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        words, zeros, scales = (stored[role] for role in ("qweight", "qzeros", "scales"))
        require(
            words.dtype is zeros.dtype is torch.int32, f"codes of {words.dtype} and {zeros.dtype}"
        )
        require(is_number(scales.dtype), f"scales of {scales.dtype}")
        require(
            len(words.shape) == len(scales.shape) == 2 and 0 not in words.shape,
            "tensors that are no matrices",
        )
        num_inputs, num_words = words.shape
        num_groups, num_outputs = scales.shape
        require(
            num_outputs == num_words * _PER_WORD,
            f"{num_outputs} scales of {num_words * _PER_WORD} outputs",
        )
        require(
            zeros.shape == (num_groups, num_words),
            f"zero-points {list(zeros.shape)} are of no such groups",
        )
        require(
            num_groups and num_inputs % num_groups == 0,
            f"{num_groups} groups of {num_inputs} inputs",
        )
        require_groups(num_groups, num_inputs, self.group_size, is_indexed=False)
        return num_outputs, num_inputs

    def dequantise(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        codes = _codes(tensors["qweight"])
        points = _codes(tensors["qzeros"])
        group_size = len(codes) // len(points)
        scales = tensors["scales"].float()
        spread = (tensor.repeat_interleave(group_size, 0) for tensor in (points, scales))
        return ((codes - next(spread)).float() * next(spread)).T.contiguous()

    def loop(self, tensors: Mapping[str, torch.Tensor]) -> Loop | None:
        by_place = (_codes(tensors["qzeros"]), tensors["scales"].float())
        arrays = (
            each.unflatten(1, (-1, _PER_WORD)).transpose(1, 2).contiguous().numpy()
            for each in by_place
        )
        places = np.argsort(ORDER).astype(np.int64)
        return partial(
            loops("column_loops").from_words_of_outputs, tensors["qweight"].numpy(), places, *arrays
        )

    def fault(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        fault = fault_of_scales(tensors["scales"], 2**_BITS - 1)
        if (
            fault is None
            and self.is_symmetric
            and bool((_codes(tensors["qzeros"]) != _MIDDLE).any())
        ):
            return (
                f"zero-points other than {_MIDDLE}, and config.json says zero_point false: "
                f"{CONTRADICTED}"
            )
        return fault


def _codes(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, 8 w] of words [n, w], in the order of the outputs."""
    num_outputs = words.shape[1] * _PER_WORD
    stored = unpack(words, _BITS, num_outputs).unflatten(1, (-1, _PER_WORD))
    codes = torch.empty_like(stored)
    codes[..., ORDER] = stored
    return codes.flatten(1)
