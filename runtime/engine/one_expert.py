"""Runs a model with a single expert in memory at a time, for measurements: slow for a token, fast
enough for a batch.

Every expert that a batch uses is read once, so that models run whose experts fit in no memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from torch import nn

from runtime.engine.engine import NAME
from runtime.model.arithmetic import accumulate, assign, expert_forward, gather, weigh
from runtime.model.layers import MoeLayer
from runtime.model.layout import aligned
from runtime.model.open import MoeModel


@dataclass(frozen=True, slots=True)
class Routed:
    """The inputs of one layer's experts: T rows, padding included."""

    layer: int
    hidden: torch.Tensor  # [T, H]
    selected: np.ndarray  # [T, K] int64, rank 0 the strongest
    weights: torch.Tensor  # [T, K] as the model applies them
    probabilities: torch.Tensor  # [T, E] float32, of the router


class ExpertBuffer:
    """A buffer for one expert on the model's device; the next read overwrites it."""

    def __init__(self, opened: MoeModel) -> None:
        self._store = opened.store
        self._host = aligned(self._store.layout.nbytes)
        self._device = self._host.to(opened.model.device)  # the same tensor on a CPU

    def read(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        """The expert's parameters by name, valid until the next read."""
        self._store.read(layer, expert, self._host)
        if self._device is not self._host:
            self._device.copy_(self._host)
        return self._store.layout.weights(self._device)


class OneExpertRunner:
    """A context manager in which `forward` runs whole batches and `decide` may change each layer's
    selection.

    `decide` is called with every layer's `Routed` and returns the experts to compute [T, K], -1 for
    a rank that is left out.
    """

    def __init__(self, opened: MoeModel, decide: Callable[[Routed], np.ndarray]) -> None:
        self._opened = opened
        self._decide = decide
        self._expert = ExpertBuffer(opened)
        self._scores: dict[int, torch.Tensor] = {}
        self._handles: list = []

    def __enter__(self) -> "OneExpertRunner":
        self._opened.model.set_experts_implementation(NAME)
        for layer in self._opened.layers:
            layer.experts.moectl_forward = self._forward_of(layer)
            self._handles.append(layer.gate.register_forward_hook(self._keep_scores(layer.index)))
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for layer in self._opened.layers:
            del layer.experts.moectl_forward
        self._opened.model.set_experts_implementation("eager")

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [B, S, V] of ids [B, S]; zeros of the mask [B, S] mark padding. Raises BadInput if
        the checkpoint was written into meanwhile."""
        device = self._opened.model.device
        with torch.inference_mode():
            mask = None if mask is None else mask.to(device)
            logits = self._opened.model(
                input_ids=ids.to(device), attention_mask=mask, use_cache=False
            ).logits
        self._opened.store.check_unchanged()
        return logits

    def _keep_scores(self, index: int) -> Callable:
        def hook(gate: nn.Module, args: tuple, output: tuple) -> None:
            self._scores[index] = output[0]

        return hook

    def _forward_of(
        self, layer: MoeLayer
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        def forward(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            probabilities = layer.distribution(self._scores.pop(layer.index))
            routed = Routed(layer.index, hidden, ids.cpu().numpy(), weights, probabilities)
            assigned = assign(self._decide(routed), hidden.device)
            out = torch.zeros_like(hidden, dtype=self._opened.sum_dtype)
            # the order in which the engine and the model's own code add
            for expert in sorted(assigned):
                x = gather(hidden, assigned[expert])
                y = expert_forward(layer.experts, self._expert.read(layer.index, expert), x)
                accumulate(out, weigh(y, weights, assigned[expert]), assigned[expert])
            return out.to(hidden.dtype)

        return forward
