"""Least frequently used: fewest uses over the whole history, which outlives eviction (MoE-Infinity
with decay 1)."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step


@dataclass
class Lfu(SimpleEviction):
    """Each use counts 1; with `decay` below 1, counts are multiplied by it once a pass."""

    decay: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise BadUsage(f"lfu needs 0 < decay <= 1, not {self.decay}")

    @property
    def as_lcp(self) -> Mapping[str, object] | None:
        """Parameters of `lcp` that correspond to it: without decay a use counts 1 for ever. None
        with decay."""
        return {"rho": 1.0} if self.decay == 1 else None

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._uses = np.zeros(shape.num_keys)
        self._counted_at = np.zeros(shape.num_keys, np.int64)

    @property
    def uses(self) -> np.ndarray:
        """Number of uses by key: a view, which may be written to."""
        return self._uses

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        self._uses[keys] = self._decayed(keys, now) + 1
        self._counted_at[keys] = now.pass_index

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        return (self._decayed(keys, now),)

    def _decayed(self, keys: np.ndarray | list[int], now: Now) -> np.ndarray:
        if self.decay == 1:
            return self._uses[keys]
        return self._uses[keys] * self.decay ** (now.pass_index - self._counted_at[keys])
