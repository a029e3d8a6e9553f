"""Routers in compiled code, for one token or a few. A trial finds which routers choose by their
matrix, and what they give.

A choice that rounding could change is left to the model's own router, so that experts are chosen as
it chooses them.
"""

from functools import partial

import torch
from torch import nn

from runtime.kernels.cpu.decoder.compiled_norm import NUMBA, like_of
from runtime.kernels.cpu.dense import MOST_TOKENS
from runtime.kernels.decoder.norms import BOUNDS
from runtime.kernels.decoder.routers import RouterOutput, RouterTrial, try_router
from runtime.kernels.load import kernels

_TOLERANCES = {torch.float32: (2e-5,), torch.bfloat16: (2e-5, 2**-7)}
"""Tolerances of the distance between selected and other experts before rounding, relative to their
logits: products may be summed in float32 and rounded once, or be rounded in between."""

_SAME = 0.99  # of logits that are rounded once


class CompiledRouter:
    """Router in compiled code for tokens one by one.

    `num_unclear` counts the tokens that it left to the module; `operand` and `how` describe it to
    kernels. `tolerance` is one of `_TOLERANCES`."""

    def __init__(self, gate: nn.Module, routing: RouterOutput, tolerance: float) -> None:
        weight = gate.weight
        bias = getattr(gate, "bias", None)
        self._theirs = partial(type(gate).forward, gate)
        self.routing = routing
        self._tolerance = tolerance
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
            tolerance,
        )  # as kernels take it
        self._like = like_of(self._dtype)
        self._run = partial(
            kernels("cpu.decoder.routing").route.of(self._like), self.operand, *self.how
        )

    @property
    def is_rounded_once(self) -> bool:
        """True if the tolerance is for logits in 16 bits that are sums in float32."""
        return self._tolerance < _TOLERANCES[self._dtype][-1]

    def forward(self, hidden_states: torch.Tensor, *others: object, **named: object) -> object:
        """Replace the module's forward, which still computes more than `MOST_TOKENS` tokens, and
        choices that are not clear, one by one."""
        x = hidden_states
        num_tokens = x.numel() // self.num_inputs
        are_taken = 0 < num_tokens <= MOST_TOKENS and x.dtype is self._dtype and x.is_contiguous()
        if not are_taken or others or named or x.requires_grad:
            return self._theirs(x, *others, **named)
        if num_tokens == 1:
            outputs = self.route(x)
            return self.left(x) if outputs is None else outputs
        rows = [self.forward(row) for row in x.view(num_tokens, 1, self.num_inputs)]
        return tuple(map(torch.cat, zip(*rows, strict=True)))

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
    trial = try_router(gate, NUMBA)
    dtype = gate.weight.dtype if trial else None
    for tolerance in _TOLERANCES.get(dtype, ()):
        deviations = {}
        for output in trial.outputs():
            router = CompiledRouter(gate, output, tolerance)
            deviations[router] = _deviation(router, trial)
        nearest = min(deviations, key=deviations.get)
        if deviations[nearest] <= BOUNDS[dtype]:
            return nearest
    return None


def _deviation(router: CompiledRouter, trial: RouterTrial) -> float:
    """Return the deviation of the choices that are clear. It is infinite if fewer than half of them
    are, or logits contradict `is_rounded_once`."""
    ours = [router.route(token) for token in trial.x]
    clear = [i for i, given in enumerate(ours) if given is not None]
    if 2 * len(clear) < len(trial.x):
        return float("inf")
    logits, weights, ids = (torch.cat([ours[i][place] for i in clear]) for place in range(3))
    if router.is_rounded_once and (logits == trial.logits[clear]).float().mean() < _SAME:
        return float("inf")
    return trial.deviation(logits, weights, ids, torch.tensor(clear))
