"""Gates of experts, as compiled kernels take them: by `runtime.kernels.gpu.blocks.activated` on a
GPU, by `runtime.kernels.cpu.gated.activated` on a CPU."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf

import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations.moe import _default_apply_gate

# attributes of the families' modules
_LIMITS = ("limit", "swiglu_limit")
_ALPHAS = ("alpha", "swiglu_alpha")
# numbers on which a gate is tried, and the largest
_NUM_TRIED = 512
_FARTHEST = 12.0


@dataclass(frozen=True, slots=True)
class Gate:
    """Function of an expert between its two products: the activation `rule` of gate, multiplied by
    up if the expert `has_up`.

    Rules are `silu`, `gelu`, `gelu_tanh`, `relu2` (the square of ReLU), and `scaled`, gpt-oss's
    `gate * sigmoid(alpha * gate) * (up + 1)`. With a `limit`, gate is clamped before to at most
    `limit`, and up to [-limit, limit]. Outputs of gate and up are in two halves, or `take_turns`.
    """

    rule: str
    has_up: bool = True
    take_turns: bool = False
    alpha: float = 1.0
    limit: float | None = None

    @property
    def constants(self) -> tuple[float, float]:
        """Alpha and the limit, infinite for none, as the CPU's kernels take them."""
        return self.alpha, inf if self.limit is None else self.limit

    def __call__(self, inner: torch.Tensor) -> torch.Tensor:
        """Return the activation of inner [t, 2 I], or [t, I] without up, as torch computes it: [t,
        I]."""
        if not self.has_up:
            return _RULES[self.rule](inner)
        gate, up = (
            (inner[..., ::2], inner[..., 1::2]) if self.take_turns else inner.chunk(2, dim=-1)
        )
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
            up = up.clamp(-self.limit, self.limit)
        if self.rule == "scaled":
            return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
        return _RULES[self.rule](gate) * up


SILU = Gate("silu")
_RULES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


RULES = (*_RULES, "scaled")
"""The rules in the order of the numbers by which compiled kernels know them."""


@torch.no_grad()
def gate_of(module: nn.Module) -> Gate | None:
    """Return the gate of a module of experts, found by trying, or None for one that the kernels do
    not know."""
    if getattr(module, "has_post_expert_norm", False) or _has_parameters(module):
        return None
    return next((gate for gate in _candidates(module) if _is_of(module, gate)), None)


def _has_parameters(module: nn.Module) -> bool:
    """Return whether the activation has learned parameters of its own."""
    activation = getattr(module, "act_fn", None)
    return isinstance(activation, nn.Module) and next(activation.parameters(), None) is not None


def _candidates(module: nn.Module) -> Iterator[Gate]:
    if not module.has_gate or type(module)._apply_gate is _default_apply_gate:
        yield from (Gate(rule, has_up=module.has_gate) for rule in _RULES)
        return
    limit, alpha = (_number(module, names) for names in (_LIMITS, _ALPHAS))
    if limit is not None:
        turns = not module.is_concatenated
        yield from (Gate(rule, take_turns=turns, limit=limit) for rule in _RULES)
        if alpha is not None:
            yield Gate("scaled", take_turns=turns, alpha=alpha, limit=limit)


def _number(module: nn.Module, names: tuple[str, ...]) -> float | None:
    found = (getattr(module, name, None) for name in names)
    return next((float(value) for value in found if isinstance(value, int | float)), None)


def _is_of(module: nn.Module, gate: Gate) -> bool:
    """Return whether the module computes this gate, to the bit: in bfloat16 it shows where a module
    rounds."""
    theirs = module._apply_gate if module.has_gate else module.act_fn
    tried = torch.sin(torch.arange(_NUM_TRIED))[None] * max(_FARTHEST, 2 * (gate.limit or 0))
    return all(torch.equal(theirs(x), gate(x)) for x in (tried, tried.bfloat16()))
