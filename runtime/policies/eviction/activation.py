"""Least used by the requests under way, later layers before earlier ones (MoE-Infinity, Xue et al.,
2024)."""

from dataclasses import dataclass

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step
from runtime.policies.eviction.shared import never_used
from runtime.policies.shared.activations import EPSILON, Activations, shares


@dataclass
class ActivationEviction(SimpleEviction):
    """Smallest `(share + epsilon) * (1 - layer / L)` first (algorithm 2 of the paper). The share is
    of the tokens of the requests in the pass, since each began; layers count from 0.

    Experts of the first layers are kept, as there is little time to prefetch them. Ties, as in a
    new request, go by the older use.
    """

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._activations = Activations(shape)
        self._early = 1 - np.arange(shape.num_layers)[:, None] / shape.num_layers
        self._used_at = never_used(shape)
        self._worth = EPSILON * self._early.repeat(shape.num_experts, axis=1)  # [L, E]
        self.ranks = self._worth.reshape(-1), self._used_at

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        if self._activations.follow(step) is not None:
            self._worth[:] = (shares(self._activations.current) + EPSILON) * self._early
        layer = step.layer
        self._activations.weigh(step, self._early.item(layer), self._worth[layer])
        self._used_at[keys] = now.step

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        worth, used_at = self.ranks
        return worth[keys], used_at[keys]
