"""The tops of many experts are resident, not the whole of few; their bottoms pass through the fast
tier (MoEpic)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage, Incompatible
from artifacts.shape import FULL_BITS, Shape
from artifacts.splits.solve import SolvedSplit
from runtime.policies.base import Artefacts, FastTier, SimpleResidency, Split

_MOST_PASSING = 0.25  # of the budget, for bottoms, as long as more tops would fit


@dataclass
class SplitResidency(SimpleResidency):
    """Cuts every expert at `theta`: its first `theta * I` neurons are its top, the others its
    bottom.

    Tops stay resident until the eviction policy evicts them; each layer has as many as its share of
    the budget holds. Without `theta`, ratios and shares are the ones that `moectl split` solved for
    this budget. With `prefer_solved` they are too if there is a solved split, else every layer is
    cut at `theta`.

    Bottoms are passing: `passing` of them fit at a time, by default two tokens' worth of experts of
    one layer, but at most a quarter of the budget; and as many more as the tops leave room for.
    """

    cuts: ClassVar[bool] = True

    theta: float | None = 0.5
    passing: int | None = None
    prefer_solved: bool = False

    def __post_init__(self) -> None:
        if self.theta is not None and not 0 < self.theta <= 1:
            raise BadUsage(f"split needs theta above 0 and at most 1, not {self.theta:g}")
        if self.passing is not None and self.passing < 1:
            raise BadUsage(f"split: at least one bottom passes at a time, not {self.passing}")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"splits"}) if self.theta is None else frozenset()

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"splits"}) if self.prefer_solved else self.requires

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        if artefacts.replicas is not None and artefacts.replicas.base != FULL_BITS:
            raise BadUsage(
                f"split cuts experts of the checkpoint, and a base of {artefacts.replicas.base} "
                "bits has them packed: leave out --base, or choose another --residency"
            )
        self._shape = shape
        self._splits = artefacts.splits or ()

    def share(self, budget_nbytes: int) -> FastTier:
        """Divide the budget. Raises BadUsage when it does not hold one expert a layer, Incompatible
        when no split was solved for it."""
        shape = self._shape
        least = shape.num_layers * shape.expert_nbytes
        if budget_nbytes < least:
            raise BadUsage(
                f"the budget of {budget_nbytes:,} bytes does not hold one expert a layer: give at "
                f"least {shape.num_layers}x ({least:,} bytes)"
            )
        return self._laid_out(budget_nbytes, self._chosen(budget_nbytes))

    def lay_out(self, solved: SolvedSplit) -> FastTier:
        """Return what the same budget holds with another split."""
        return self._laid_out(solved.budget_nbytes, solved)

    def _laid_out(self, budget_nbytes: int, solved: SolvedSplit | None) -> FastTier:
        shape = self._shape
        thetas = np.full(shape.num_layers, self.theta) if solved is None else solved.theta
        neurons = np.array([shape.top_neurons(theta) for theta in thetas.tolist()])
        sizes = np.array([shape.segment_nbytes(count) for count in neurons.tolist()])
        tops = sizes[:, 0]
        bottom = int(sizes[:, 1].max())
        left = budget_nbytes - self._reserved(budget_nbytes, bottom)
        if solved is None:
            num_tops = self.capacities(
                min(max(left // tops[0], shape.num_layers), shape.num_keys), shape
            )
        else:
            cached = np.clip(
                np.rint(solved.budgets / solved.theta).astype(np.int64), 1, shape.num_experts
            )
            num_tops = self._fitted(cached, tops, left)
        rest = budget_nbytes - int((num_tops * tops).sum())
        num_bottoms = min(rest // bottom, shape.num_keys) if bottom else 0
        return FastTier(
            int(num_tops.sum()) + num_bottoms, split=Split(neurons, num_tops, num_bottoms, solved)
        )

    def _chosen(self, budget_nbytes: int) -> SolvedSplit | None:
        """Return the split to follow; None: all layers are cut at `theta`."""
        if self.theta is not None and not self.prefer_solved:
            return None
        solved = next(
            (split for split in self._splits if split.budget_nbytes == budget_nbytes), None
        )
        if solved is None and self.theta is not None:
            self.fallbacks = (
                "no split was solved for this budget on this machine: experts are cut at "
                f"theta={self.theta:g}; `moectl split --budget` with that of the run solves one",
            )
            return None
        if solved is None:
            budgets = ", ".join(sorted({f"{split.budget_nbytes:,}" for split in self._splits}))
            raise Incompatible(
                f"the store's splits were made for another budget ({budgets} bytes, not "
                f"{budget_nbytes:,}): run `moectl split --budget` with that of the run"
            )
        if solved.theta.shape != (self._shape.num_layers,):
            raise Incompatible(
                f"the store's split is of {len(solved.theta)} layers, the model has "
                f"{self._shape.num_layers}: it is another model's, run `moectl split`"
            )
        return solved

    def _reserved(self, budget_nbytes: int, bottom: int) -> int:
        """Return the bytes reserved for bottoms."""
        if self.passing is not None:
            return min(self.passing * bottom, budget_nbytes)
        return max(bottom, min(2 * self._shape.top_k * bottom, int(_MOST_PASSING * budget_nbytes)))

    def _fitted(self, num_tops: np.ndarray, tops: np.ndarray, budget_nbytes: int) -> np.ndarray:
        """Take tops from the layers with most until the tops fit, but leave at least one a
        layer."""
        while (num_tops * tops).sum() > budget_nbytes and num_tops.max() > 1:
            num_tops[num_tops.argmax()] -= 1
        return num_tops
