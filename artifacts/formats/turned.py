"""A matrix of any format that is stored transposed, [in, out], as Qwen3-VL-MoE publishes its
experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from artifacts.formats.base import Format, Loop, Stored


@dataclass(frozen=True, slots=True)
class Turned:
    """`w = dequantised.T`."""

    fills_bfloat16: ClassVar[bool] = False

    stored: Format

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def lacking(self) -> int:
        return self.stored.lacking

    def weight_nbytes(self, group_size: int) -> float:
        return self.stored.weight_nbytes(group_size)

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        num_inputs, num_outputs = self.stored.shape(stored)
        return num_outputs, num_inputs

    def dequantise(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.stored.dequantise(tensors).T.contiguous()

    def loop(self, tensors: Mapping[str, torch.Tensor]) -> Loop | None:
        return None

    def fault(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        return self.stored.fault(tensors)
