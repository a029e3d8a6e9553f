"""The gate of gpt-oss's experts, which compiled kernels know beside SiLU's."""

from dataclasses import dataclass

from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gpt-oss's activation `(up + 1) * gate * sigmoid(alpha * gate)`, gate at most `limit`, up
    within it; rows of gate and up take turns, and both have a bias."""

    alpha: float
    limit: float


def clamped_gate(module: nn.Module) -> ClampedGate | None:
    """The activation of gpt-oss's experts; None for others."""
    if getattr(type(module), "_apply_gate", None) is not GptOssExperts._apply_gate:
        return None
    return ClampedGate(module.alpha, module.limit)
