"""Routers in compiled code, for one token. A trial finds which routers choose by their matrix, and
what they give.

A choice that rounding could change is left to the model's own router, so that experts are chosen as
it chooses them.
"""

from dataclasses import dataclass
from functools import partial
from inspect import signature

import torch
from torch import nn

from runtime.kernels.cpu.decoder.compiled_norm import BOUNDS, like_of
from runtime.kernels.load import is_cpu_operand, kernels

_NUM_TOKENS = 256  # random ones, on which a router is tried
_SIZES = (0.25, 1.0, 4.0)  # of their logits
_TOLERANCES = {torch.float32: (2e-5,), torch.bfloat16: (2e-5, 2**-7)}
"""Tolerances of the distance between selected and other experts before rounding, relative to their
logits: products may be summed in float32 and rounded once, or be rounded in between."""

_SAME = 0.99  # of logits that are rounded once


@dataclass(frozen=True, slots=True)
class RouterOutput:
    """Output of a router for its matrix times a token: dtypes of logits and weights.
    `is_shared_out`: the weights of the `top_k` add up to 1."""

    top_k: int
    is_shared_out: bool
    logits_dtype: torch.dtype
    weights_dtype: torch.dtype
    tolerance: float


class CompiledRouter:
    """Router in compiled code for one token. `num_unclear` counts the tokens that it left to the
    module; `operand` and `how` describe it to kernels."""

    def __init__(self, gate: nn.Module, routing: RouterOutput) -> None:
        weight = gate.weight
        bias = getattr(gate, "bias", None)
        self._theirs = partial(type(gate).forward, gate)
        self.routing = routing
        self._dtype = weight.dtype
        self.num_experts, self.num_inputs = weight.shape
        self.num_unclear = 0
        wide = (routing.logits_dtype is torch.float32, routing.weights_dtype is torch.float32)
        self.operand = (
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            self.num_inputs,
            self.num_experts,
        )
        self.how = (
            (routing.is_shared_out, *wide),
            routing.top_k,
            routing.tolerance,
        )  # as kernels take it
        self._like = like_of(self._dtype)
        self._run = partial(
            kernels("cpu.decoder.routing").route.of(self._like), self.operand, *self.how
        )

    @property
    def is_rounded_once(self) -> bool:
        """True if the tolerance is for logits in 16 bits that are sums in float32."""
        return self.routing.tolerance < _TOLERANCES[self._dtype][-1]

    def forward(self, hidden_states: torch.Tensor, *others: object, **named: object) -> object:
        """Replace the module's forward, which still computes more than one token, and choices that
        are not clear."""
        x = hidden_states
        is_token = x.numel() == self.num_inputs and x.dtype is self._dtype and x.is_contiguous()
        if not is_token or others or named or x.requires_grad:
            return self._theirs(x, *others, **named)
        outputs = self.route(x)
        return self.left(x) if outputs is None else outputs

    def left(self, x: torch.Tensor) -> object:
        """Return the module's own output for a token whose choice is not clear, and count it."""
        self.num_unclear += 1
        return self._theirs(x)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Return the logits [1, E], weights and ids [1, K] of a token [.., H], or None if its
        choice is not clear."""
        routing = self.routing
        logits = torch.empty(1, self.num_experts, dtype=routing.logits_dtype)
        weights = torch.empty(1, routing.top_k, dtype=routing.weights_dtype)
        ids = torch.empty(1, routing.top_k, dtype=torch.int64)
        places = logits.data_ptr(), weights.data_ptr(), ids.data_ptr()
        return (logits, weights, ids) if self._run(x.data_ptr(), *places, self._like) else None


def compiled_router(gate: nn.Module) -> CompiledRouter | None:
    """Return the router in compiled code if it is a matrix and compiled code makes the same
    choices, otherwise None."""
    state = dict(gate.named_parameters()) | dict(gate.named_buffers())
    is_matrix = {"weight"} <= state.keys() <= {"weight", "bias"} and gate.weight.dim() == 2
    if not is_matrix or len(signature(type(gate).forward).parameters) != 2:  # self and tokens
        return None
    dtypes = {each.dtype for each in state.values()}
    is_plain = all(map(_is_plain, state.values()))
    if not is_plain or len(dtypes) > 1 or not dtypes <= _TOLERANCES.keys():
        return None
    with torch.inference_mode():
        return _tried(gate)


def _is_plain(weights: torch.Tensor) -> bool:
    return is_cpu_operand(weights) and weights.is_contiguous()


def _tried(gate: nn.Module) -> CompiledRouter | None:
    """Return the nearest of the ways to weigh experts if all choices and numbers agree with the
    router's on random tokens, otherwise None."""
    random = torch.Generator().manual_seed(0)
    num_experts, num_inputs = gate.weight.shape
    x = (
        torch.randn(_NUM_TOKENS, num_inputs, generator=random)
        / gate.weight.float().norm(dim=1).mean()
    )
    x = (x * torch.tensor(_SIZES).repeat(_NUM_TOKENS)[:_NUM_TOKENS, None]).to(gate.weight.dtype)
    theirs = type(gate).forward(gate, x)
    if not isinstance(theirs, tuple) or [each.dim() for each in theirs] != [2, 2, 2]:
        return None
    logits, weights, ids = theirs
    if logits.shape[1] != num_experts or weights.shape != ids.shape or ids.dtype is not torch.int64:
        return None
    for tolerance in _TOLERANCES[gate.weight.dtype]:
        deviations = {}
        for is_shared_out in (True, False):
            output = RouterOutput(
                ids.shape[1], is_shared_out, logits.dtype, weights.dtype, tolerance
            )
            router = CompiledRouter(gate, output)
            deviations[router] = _deviation(router, x, theirs)
        nearest = min(deviations, key=deviations.get)
        if deviations[nearest] <= BOUNDS[gate.weight.dtype]:
            return nearest
    return None


def _deviation(router: CompiledRouter, x: torch.Tensor, theirs: tuple[torch.Tensor, ...]) -> float:
    """Return the largest deviation of logits and weights, relative to the largest of the token's.

    It is infinite if a clear choice differs, fewer than half of the choices are clear, or logits
    contradict `is_rounded_once`."""
    ours = [router.route(token) for token in x]
    clear = [i for i, given in enumerate(ours) if given is not None]
    if 2 * len(clear) < len(x):
        return float("inf")
    own = [torch.cat([ours[i][place] for i in clear]) for place in range(3)]
    other = [each[clear] for each in theirs]
    own_ids, own_order = own[2].sort()
    ids, order = other[2].sort()
    if not torch.equal(own_ids, ids):
        return float("inf")
    if router.is_rounded_once and (own[0] == other[0]).float().mean() < _SAME:
        return float("inf")
    pairs = (own[0], other[0]), (own[1].gather(1, own_order), other[1].gather(1, order))
    return max(_distance(*pair) for pair in pairs)


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    difference = (ours.float() - theirs.float()).abs().amax(1)
    return (difference / theirs.float().abs().amax(1)).max().item()
