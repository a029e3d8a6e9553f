"""Lean towards experts that are resident (Mixture of Cache-Conditional Experts, cache-prior;
lossy)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Simple, Step


@dataclass
class CacheAware(Simple):
    """Experts are selected by `z' = z + strength * spread * resident`, and weighted by the original
    probabilities.

    z are the router's logits, spread the running mean of `max z - min z` over the layer's tokens so
    far, this step's included. The `keep` strongest ranks of a token stay in any case (the paper's
    J). A token whose experts change keeps the scale of its own router, the ratio of its weights to
    its probabilities: experts that stay keep their weight, and a stand-in has the weight of its own
    probability. For routers that renormalise, the weights of such a token then sum to less than 1;
    `renormalise` scales them to their old sum.
    """

    reroutes: ClassVar[bool] = True
    sees_probabilities: ClassVar[bool] = True

    strength: float = 0.2
    keep: int = 0
    renormalise: bool = False

    def __post_init__(self) -> None:
        if self.strength < 0 or self.keep < 0:
            raise BadUsage(
                f"cache_aware needs strength >= 0 and keep >= 0, not {self.strength} and "
                f"{self.keep}"
            )

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._num_tokens = np.zeros(shape.num_layers)
        self._spread = np.zeros(shape.num_layers)

    def route(self, step: Step, resident: np.ndarray) -> Step:
        assert step.probabilities is not None, "cache_aware runs without router probabilities"
        # Logits up to a constant per token; a probability that underflowed to 0 becomes the
        # smallest of float32.
        z = np.log(np.maximum(step.probabilities, np.finfo(np.float32).tiny), dtype=np.float64)
        self._note(step.layer, z)
        biased = z + self.strength * self._spread[step.layer] * resident
        biased[rows(step), step.selected[:, : self.keep]] = np.inf
        selected = strongest(biased, step)
        changed = (np.sort(selected, axis=1) != np.sort(step.selected, axis=1)).any(
            axis=1, keepdims=True
        )
        if not changed.any():
            return step
        weights = np.where(changed, self._weigh(step, selected), step.weights)
        return replace(step, selected=np.where(changed, selected, step.selected), weights=weights)

    def _note(self, layer: int, z: np.ndarray) -> None:
        spreads = z.max(axis=1) - z.min(axis=1)
        self._num_tokens[layer] += len(spreads)
        self._spread[layer] += (spreads - self._spread[layer]).sum() / self._num_tokens[layer]

    def _weigh(self, step: Step, selected: np.ndarray) -> np.ndarray:
        """Return float32 weights [T, K] of `selected`."""
        total = step.weights.sum(axis=1, keepdims=True)
        old, new = (step.probabilities[rows(step), ids] for ids in (step.selected, selected))
        divisor = (new if self.renormalise else old).sum(axis=1, keepdims=True)
        return (new * (total / divisor)).astype(np.float32)


def strongest(biased: np.ndarray, step: Step) -> np.ndarray:
    """Return [T, K] experts of the largest `biased` [T, E], the router's own first among ties, by
    falling probability."""
    is_own = np.zeros(biased.shape, bool)
    tokens = rows(step)
    is_own[tokens, step.selected] = True
    chosen = np.lexsort((~is_own, -biased), axis=1)[:, : step.selected.shape[1]]
    chosen.sort(axis=1)
    return chosen[tokens, np.argsort(-step.probabilities[tokens, chosen], axis=1, kind="stable")]


def rows(step: Step) -> np.ndarray:
    """Return token numbers [T, 1], to index [T, E] by [T, *] expert ids."""
    return np.arange(len(step.selected))[:, None]
