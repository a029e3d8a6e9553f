"""Lean towards experts that are resident (Mixture of Cache-Conditional Experts, cache-prior; lossy)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Simple, Step


@dataclass
class CacheAware(Simple):
    """`z' = z + strength * spread * resident` selects; the original probabilities weigh.

    z are the router's logits, spread the running mean of `max z - min z` over the layer's tokens so far, those of this
    step included. The `keep` strongest ranks of a token stay whatever is resident (the paper's J).
    A token whose experts change keeps the scale of its own router, the ratio of its weights to its probabilities:
    experts that stay weigh what they did, and a stand-in weighs as it would have at its own probability. For routers
    that renormalise, the weights of such a token then sum to less than 1; `renormalise` scales them to their old sum.
    """

    reroutes: ClassVar[bool] = True
    sees_probabilities: ClassVar[bool] = True

    strength: float = 0.2
    keep: int = 0
    renormalise: bool = False

    def __post_init__(self) -> None:
        if self.strength < 0 or self.keep < 0:
            raise BadUsage(f"cache_aware needs strength >= 0 and keep >= 0, not {self.strength} and {self.keep}")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._num_tokens = np.zeros(shape.num_layers)
        self._spread = np.zeros(shape.num_layers)

    def route(self, step: Step, resident: np.ndarray) -> Step:
        assert step.probabilities is not None, "cache_aware runs without router probabilities"
        # Logits but for a constant a token; what underflowed to 0 is as unlikely as float32 can say.
        z = np.log(np.maximum(step.probabilities, np.finfo(np.float32).tiny), dtype=np.float64)
        self._note(step.layer, z)
        biased = z + self.strength * self._spread[step.layer] * resident
        biased[_rows(step), step.selected[:, : self.keep]] = np.inf
        selected = _strongest(biased, step)
        changed = (np.sort(selected, axis=1) != np.sort(step.selected, axis=1)).any(axis=1, keepdims=True)
        if not changed.any():
            return step
        weights = np.where(changed, self._weigh(step, selected), step.weights)
        return replace(step, selected=np.where(changed, selected, step.selected), weights=weights)

    def _note(self, layer: int, z: np.ndarray) -> None:
        spreads = z.max(axis=1) - z.min(axis=1)
        self._num_tokens[layer] += len(spreads)
        self._spread[layer] += (spreads - self._spread[layer]).sum() / self._num_tokens[layer]

    def _weigh(self, step: Step, selected: np.ndarray) -> np.ndarray:
        """[T, K] float32 weights of `selected`."""
        own = step.weights.sum(axis=1, keepdims=True)
        old, new = (step.probabilities[_rows(step), ids] for ids in (step.selected, selected))
        divisor = (new if self.renormalise else old).sum(axis=1, keepdims=True)
        return (new * (own / divisor)).astype(np.float32)


def _strongest(biased: np.ndarray, step: Step) -> np.ndarray:
    """[T, K] experts of the largest `biased` [T, E], the router's own first among equals, by falling probability."""
    is_own = np.zeros(biased.shape, bool)
    rows = _rows(step)
    is_own[rows, step.selected] = True
    chosen = np.lexsort((~is_own, -biased), axis=1)[:, : step.selected.shape[1]]
    chosen.sort(axis=1)
    return chosen[rows, np.argsort(-step.probabilities[rows, chosen], axis=1, kind="stable")]


def _rows(step: Step) -> np.ndarray:
    """[T, 1] token numbers, to index [T, E] by [T, *] expert ids."""
    return np.arange(len(step.selected))[:, None]
