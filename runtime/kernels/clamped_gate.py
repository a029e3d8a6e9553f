"""Gate of gpt-oss's experts, which compiled kernels support besides SiLU."""

from dataclasses import dataclass

from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gpt-oss's activation `(up + 1) * gate * sigmoid(alpha * gate)`, with gate clamped to at most
    `limit` and up to [-limit, limit]. Rows of gate and up alternate, and both have a bias."""

    alpha: float
    limit: float


def clamped_gate(module: nn.Module) -> ClampedGate | None:
    """Return the activation of gpt-oss's experts, or None for others."""
    if getattr(type(module), "_apply_gate", None) is not GptOssExperts._apply_gate:
        return None
    return ClampedGate(module.alpha, module.limit)
