"""Horizon as a device that decides by itself knows it: by what was used up to the end of the pass
before."""

from dataclasses import dataclass, replace

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step
from runtime.policies.eviction.horizon import Horizon


@dataclass
class LateHorizon(SimpleEviction):
    """Evicts by the ranks that `horizon` had when the last pass ended. It learns the uses of a pass
    when the next one begins, so that a host can learn from a pass while a device computes it, and
    write the ranks between two. It ignores predictions, which such a host does not see."""

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._shape = shape
        self._horizon = Horizon()
        self._horizon.prepare(shape, artefacts)
        nearness, older = self._horizon.ranks
        self.ranks = nearness.copy(), older
        self._uses: list[tuple[list[int], Step, Now]] = []  # of the pass under way
        self._pass_index = -1

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        self.begin_pass(now)
        if step.foreseen is not None:
            step = replace(step, predicted=None, learned=None)
        self._uses.append((keys, step, replace(now)))

    def begin_pass(self, now: Now) -> None:
        """Learn from the passes before this one, unless that is done."""
        if now.pass_index != self._pass_index:
            self._pass_index = now.pass_index
            for use in self._uses:
                self._horizon.used(*use)
            self._uses.clear()
            self.ranks[0][:] = self._horizon.ranks[0]

    def turns(self, now: Now) -> np.ndarray:
        """Return the place of each expert in its layer's eviction order for the pass under way, [L,
        E] int32; 0 is the first to go."""
        self.begin_pass(now)
        nearness = self.ranks[0].reshape(self._shape.num_layers, -1)
        turns = np.empty(nearness.shape, np.int32)
        np.put_along_axis(
            turns,
            nearness.argsort(axis=1, kind="stable"),
            np.arange(nearness.shape[1])[None],
            axis=1,
        )
        return turns

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        return (self.ranks[0][keys],)
