"""The arithmetic of experts, following the flags of the model's own module: one expert on its
tokens, and the sum over experts.

In this order and in these dtypes the result is bit-identical to the model's own eager code.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

# the parameters of an expert: GATE_UP of a gated one, UP of another
GATE_UP = "gate_up_proj"
UP = "up_proj"
DOWN = "down_proj"


class Assigned(NamedTuple):
    """The tokens that selected one expert, and at which ranks. For a step of one token, `tokens` is
    None."""

    tokens: torch.Tensor | None  # [t] int64, ranks ascending, then tokens
    ranks: torch.Tensor | int  # [t] int64


def project(
    module: nn.Module, weights: dict[str, torch.Tensor], name: str, x: torch.Tensor
) -> torch.Tensor:
    """Compute one projection of one expert, x [t, in] -> [t, out]."""
    y = x @ weights[name] if module.is_transposed else F.linear(x, weights[name])
    return y + weights[f"{name}_bias"] if module.has_bias else y


def expert_forward(
    module: nn.Module,
    weights: dict[str, torch.Tensor],
    x: torch.Tensor,
    *,
    project: Callable[..., torch.Tensor] = project,
) -> torch.Tensor:
    """Compute one expert on its tokens, x [t, H] -> [t, H]; flags of `module` say if it is gated,
    biased or transposed.

    `weights` goes to `project`: one expert's parts by name, or several experts' if that `project`
    takes them.
    """
    up = GATE_UP if module.has_gate else UP
    y = project(module, weights, up, x)
    y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
    y = project(module, weights, DOWN, y)
    # transformers before 5.20 has no such flag
    has_norm = getattr(module, "has_post_expert_norm", False)
    return module.post_expert_norm(y) if has_norm else y


def assign(selected: np.ndarray, device: torch.device) -> dict[int, Assigned]:
    """Group a step's [T, K] expert ids by expert, without -1, in one copy to the device."""
    num_tokens, top_k = selected.shape
    if num_tokens == 1:
        assigned = {}
        is_once = True
        for rank, expert in enumerate(selected[0].tolist()):
            if expert >= 0:
                is_once &= expert not in assigned
                assigned[expert] = Assigned(None, rank)
        if is_once:  # a router by hashes may give a token one expert twice
            return assigned
    by_rank = selected.T.ravel()
    order = np.argsort(by_rank, kind="stable")
    places = torch.from_numpy(np.stack((order % num_tokens, order // num_tokens))).to(device)
    experts, starts = np.unique(by_rank[order], return_index=True)
    ends = [*starts[1:].tolist(), len(order)]
    return {
        expert: Assigned(places[0, start:end], places[1, start:end])
        for expert, start, end in zip(experts.tolist(), starts.tolist(), ends, strict=True)
        if expert >= 0
    }


def gather(hidden: torch.Tensor, assigned: Assigned) -> torch.Tensor:
    """Return the hidden states [t, H] of an expert's tokens."""
    return hidden if assigned.tokens is None else hidden[assigned.tokens]


def weigh(y: torch.Tensor, weights: torch.Tensor, assigned: Assigned) -> torch.Tensor:
    """Return an expert's output times its routing weights, [t, H]; `weights` [T, K]."""
    if assigned.tokens is None:
        return y * weights[:, assigned.ranks : assigned.ranks + 1]
    return y * weights[assigned.tokens, assigned.ranks, None]


def accumulate(out: torch.Tensor, y: torch.Tensor, assigned: Assigned) -> None:
    """Add an expert's share to `out` [T, H]. In another than ascending order, sums round
    differently."""
    if assigned.tokens is None:
        out.add_(y.to(out.dtype))
    else:
        out.index_add_(0, assigned.tokens, y.to(out.dtype))
