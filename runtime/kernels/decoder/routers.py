"""Routers that are a matrix: each chooses the experts of the largest logits. A trial on random
tokens finds what they give."""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature

import torch
from torch import nn

from runtime.kernels.decoder.norms import Compiled

_NUM_TOKENS = 256  # random ones, on which a router is tried
_SIZES = (0.25, 1.0, 4.0)  # of their logits


@dataclass(frozen=True, slots=True)
class RouterOutput:
    """Output of a router for its matrix times a token: dtypes of logits and weights.
    `is_shared_out`: the weights of the `top_k` add up to 1."""

    top_k: int
    is_shared_out: bool
    logits_dtype: torch.dtype
    weights_dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class RouterTrial:
    """Random tokens x [T, H], and the logits [T, E], weights and ids [T, K] that a router gives for
    them."""

    x: torch.Tensor
    logits: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor

    def outputs(self) -> Iterator[RouterOutput]:
        """Yield the outputs that the router may give: the weights are values of the softmax, or
        divided by their sum."""
        for is_shared_out in (True, False):
            yield RouterOutput(
                self.ids.shape[1], is_shared_out, self.logits.dtype, self.weights.dtype
            )

    def deviation(
        self,
        logits: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        which: torch.Tensor | slice = slice(None),
    ) -> float:
        """Return the largest deviation of logits and weights for the tokens `which`, relative to
        the largest of the token's; infinite if other experts are chosen."""
        own_ids, own_order = ids.sort()
        their_ids, order = self.ids[which].sort()
        if not torch.equal(own_ids, their_ids):
            return float("inf")
        return max(
            _distance(logits, self.logits[which]),
            _distance(weights.gather(1, own_order), self.weights[which].gather(1, order)),
        )


def try_router(gate: nn.Module, compiled: Compiled) -> RouterTrial | None:
    """Return what a router gives for random tokens if it may be a matrix, otherwise None."""
    state = dict(gate.named_parameters()) | dict(gate.named_buffers())
    is_matrix = {"weight"} <= state.keys() <= {"weight", "bias"} and gate.weight.dim() == 2
    if not is_matrix or len(signature(type(gate).forward).parameters) != 2:  # self and tokens
        return None
    are_taken = all(compiled.takes(each) and each.is_contiguous() for each in state.values())
    if not are_taken or len({each.dtype for each in state.values()}) > 1:
        return None
    with torch.inference_mode():
        return _tried(gate)


def _tried(gate: nn.Module) -> RouterTrial | None:
    random = torch.Generator().manual_seed(0)
    num_experts, num_inputs = gate.weight.shape
    x = torch.randn(_NUM_TOKENS, num_inputs, generator=random)
    x = x * torch.tensor(_SIZES).repeat(_NUM_TOKENS)[:_NUM_TOKENS, None]
    x = (x / gate.weight.float().norm(dim=1).mean().cpu()).to(gate.weight)
    theirs = type(gate).forward(gate, x)
    if not isinstance(theirs, tuple) or [each.dim() for each in theirs] != [2, 2, 2]:
        return None
    logits, weights, ids = theirs
    if logits.shape[1] != num_experts or weights.shape != ids.shape or ids.dtype is not torch.int64:
        return None
    return RouterTrial(x, logits, weights, ids)


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    difference = (ours.float() - theirs.float()).abs().amax(1)
    return (difference / theirs.float().abs().amax(1)).max().item()
