"""The interface of a step's output, and the choice of the compiled output that suits a model.

An output computes the experts of one layer step and adds up their results. There are three:
`TorchOutput` gives the model's own bits; `CpuOutput` and `GpuOutput` are compiled code.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import nn

from runtime.backends.cpu.cpu_backend import CpuOutput
from runtime.backends.triton.triton_backend import GpuOutput
from runtime.control.plan import Place
from runtime.model.open import MoeModel
from runtime.tiers.near import NearTier


class StepOutput(Protocol):
    """Computes and adds up the experts of a step: begin it, `add` and `add_near` experts in any
    order, `finish` it."""

    name: str  # for a receipt

    def add(self, places: Sequence[Place]) -> None:
        """Compute the experts in these slots, or on the replicas that stay beside them; all must be
        there."""

    def add_near(self, places: Sequence[Place], near: NearTier, ready: Sequence[Place]) -> None:
        """Compute `places` in the near tier, and the `ready` experts as by `add`, before them or
        together with them."""

    def finish(self) -> torch.Tensor:
        """Return the layer's output [T, H]."""

    def forward(
        self,
        module: nn.Module,
        hidden: torch.Tensor,
        experts: Sequence[int],
        places: Sequence[Place],
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a whole step of one token [1, H] whose `experts` are all there, with `weights`
        [1, K]: [1, H]."""


class TokenOutput(StepOutput, Protocol):
    """An output that begins with one token, whose weights are on the host."""

    def begin_token(
        self, module: nn.Module, hidden: torch.Tensor, experts: Sequence[int], weights: np.ndarray
    ) -> None:
        """Begin a token [1, H] that goes to `experts` [K], -1 for none, with `weights` [K]
        float32."""


class BatchOutput(StepOutput, Protocol):
    """An output that begins with any number of tokens."""

    def begin(
        self, module: nn.Module, hidden: torch.Tensor, experts: np.ndarray, weights: torch.Tensor
    ) -> None:
        """Begin tokens [T, H] that go to `experts` [T, K], -1 for none, with `weights` [T, K] on
        the tokens' device."""

    def clear(self) -> None:
        """Drop an unfinished step and everything known of the contents of slots."""


def choose_output(
    opened: MoeModel, *, num_devices: int = 1, has_replicas: bool = False
) -> type[CpuOutput] | type[GpuOutput] | None:
    """Return the compiled output for this model's experts on their device, whole or cut in two;
    None where only torch computes them. A GPU's kernels support one arena of slots, and so one
    device. Kernels for replicas, which may be used beside experts as published, support only SiLU's
    gate without bias."""
    kinds = (CpuOutput, GpuOutput) if num_devices == 1 else (CpuOutput,)
    return next((kind for kind in kinds if kind.suits(opened, has_replicas=has_replicas)), None)
