"""Which compiled code computes a few tokens' experts, if any does."""

from collections.abc import Callable, Sequence

import torch

from runtime.engine import output_cpu as fused
from runtime.engine import output_gpu as fused_cuda
from runtime.engine.output_cpu import Fused
from runtime.engine.output_gpu import FusedCuda
from runtime.model.open import MoeModel

NAMES = {Fused: "fused", FusedCuda: "fused, triton"}  # for a receipt


def fused_for(opened: MoeModel, *, num_devices: int = 1) -> type[Fused] | type[FusedCuda] | None:
    """What computes experts of this model's kind where it is, whole or cut in two; None: torch. A GPU's kernels know
    one arena of slots."""
    kinds = (Fused, FusedCuda) if num_devices == 1 else (Fused,)
    return next((kind for kind in kinds if kind.suits(opened)), None)


def alone(opened: MoeModel, contents: Sequence[torch.Tensor]) -> Callable[[int], None]:
    """Computes expert number i of `contents`, uint8, on one token and forgets it: to be timed."""
    kind = fused if fused_for(opened) is Fused else fused_cuda
    return kind.alone(opened, contents)
