"""A tier of the experts that were used most lately, put in order every few tokens (Strata's
adaptive tier)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import FULL_BITS, Shape
from runtime.policies.base import Artefacts, Placement, SimpleResidency, Step


@dataclass
class Adaptive(SimpleResidency):
    """Every `every` decoded passes, the policy moves at most `moves` experts of all layers into the
    tier, those of the largest gain first; then it multiplies all counts by `decay`. A count is the
    number of tokens that used an expert. An expert outside the tier may move once its count is 2:
    into an empty slot of its layer, or into the slot of the least used expert there if its count is
    larger by `margin`. The expert that leaves is outside at once; the one that comes is inside once
    its bytes have been moved.

    Made for `near:fill=no,waits=no`, which computes all others near and leaves the tier alone.

    Source: Strata, `AdaptiveTier::adapt` of src/core/adaptive_tier.cpp at 00974d25, whose defaults
    these are. There the tier begins with a profile of the model and moves are paced by measured
    rates; here it begins empty, and tokens of prompts are counted but order nothing.
    """

    places: ClassVar[bool] = True

    every: int = 4
    moves: int = 96
    decay: float = 0.7
    margin: float = 1.5

    def __post_init__(self) -> None:
        if not (self.every >= 1 and self.moves >= 1 and 0 <= self.decay <= 1 and self.margin > 0):
            raise BadUsage(
                "adaptive needs every >= 1, moves >= 1, decay in 0..1 and margin > 0, not "
                f"{self.every}, {self.moves}, {self.decay} and {self.margin}"
            )

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._counts = np.zeros((shape.num_layers, shape.num_experts))
        self._inside: list[list[int]] = [[] for _ in range(shape.num_layers)]
        self._num_slots: dict[int, Sequence[int]] = {}  # of the layers that were seen
        self._passes = 0
        self._changed: set[int] = set()  # layers to place anew

    def observe(self, step: Step) -> None:
        np.add.at(self._counts[step.layer], step.selected, 1)

    def place(self, step: Step, num_slots: Sequence[int]) -> Placement | None:
        layer = step.layer
        self._num_slots[layer] = num_slots
        if step.decodes and layer == len(self._inside) - 1:
            self._passes += 1
            if self._passes % self.every == 0:
                self._adapt()
        if layer not in self._changed:
            return None
        self._changed.remove(layer)
        bits = np.full(self._counts.shape[1], FULL_BITS)
        return Placement(np.array(self._inside[layer], np.int64), bits)

    def _adapt(self) -> None:
        """Move the best of all layers' candidates, and let the counts decay."""
        ranked = [
            (-gain, layer, comes, leaves)
            for layer in self._num_slots
            for gain, comes, leaves in self._candidates(layer)
        ]
        for _, layer, comes, leaves in sorted(ranked, key=lambda move: move[:3])[: self.moves]:
            inside = self._inside[layer]
            if leaves >= 0:
                inside.remove(leaves)
            inside.append(comes)
            self._changed.add(layer)
        self._counts *= self.decay

    def _candidates(self, layer: int) -> list[tuple[float, int, int]]:
        """Return the gain of each move, the expert that comes and the one that leaves, -1 for an
        empty slot."""
        inside = self._inside[layer]
        outside = set(np.flatnonzero(self._counts[layer] >= 2).tolist()).difference(inside)
        slots = self._num_slots[layer]
        moves = []
        for device, num_slots in enumerate(slots):
            here = [expert for expert in inside if expert % len(slots) == device]
            others = [expert for expert in outside if expert % len(slots) == device]
            moves += self._moves(self._counts[layer], here, others, num_slots)
        return moves

    def _moves(
        self, counts: np.ndarray, inside: list[int], outside: list[int], num_slots: int
    ) -> Iterator[tuple[float, int, int]]:
        """Yield the moves of one device: into its empty slots, then in place of the least used."""
        ranked = sorted(outside, key=lambda expert: (-counts[expert], expert))
        room = num_slots - len(inside)
        for expert in ranked[:room]:
            yield counts[expert], expert, -1
        least = sorted(inside, key=lambda expert: (counts[expert], expert))
        for comes, leaves in zip(ranked[room:], least, strict=False):
            if counts[comes] < counts[leaves] + self.margin:
                return
            yield counts[comes] - counts[leaves], comes, leaves
