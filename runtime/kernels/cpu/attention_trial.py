"""Trial that finds which attentions of a model compiled code computes, and how."""

from functools import partial

from torch import nn

from runtime.kernels.cpu.attention_parts import Heads, Rotation, recognise_heads, rotations
from runtime.kernels.cpu.compiled_attention import CompiledAttention
from runtime.kernels.cpu.trial import ModuleTrial, run_trials
from runtime.model.open import MoeModel

_SIZES = {1.0: 1.0, 8.0: 16.0, 64.0: float("inf")}
"""Factors on the output's bound, by the factor on a token's numbers. Large scores leave one
position, and rounding decides which one. Keys and values keep their bound."""


def compiled_attentions(opened: MoeModel) -> dict[nn.Module, CompiledAttention | str]:
    """Return every attention of the model in compiled code, or the reason why it is not
    compiled."""
    modules = [module for module in opened.model.modules() if _is_attention(module)]
    recognised = {module: recognise_heads(module) for module in modules}
    trials = {
        module: _trial(module, heads)
        for module, heads in recognised.items()
        if isinstance(heads, Heads)
    }
    return recognised | run_trials(opened, trials)


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module has a place in the cache and projects its output."""
    return hasattr(module, "layer_idx") and any(
        hasattr(module, name) for name in ("o_proj", "out_proj")
    )


def _trial(module: nn.Module, heads: Heads) -> ModuleTrial:
    """Return the trial of the ways in which the attention may rotate its heads."""
    make = partial(_candidate, module, heads)
    return ModuleTrial(module, module.layer_idx, list(rotations(heads)), make, _SIZES)


def _candidate(
    module: nn.Module, heads: Heads, rotation: Rotation, num_outputs: int
) -> CompiledAttention:
    return CompiledAttention(module, heads, rotation, num_outputs=num_outputs)
