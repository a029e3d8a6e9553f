"""Least high-precision use (HOBBIT): fewest uses at full precision go first; a low replica is cheap
to bring back."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from artifacts.shape import FULL_BITS, Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step
from runtime.policies.eviction.shared import never_used, rank_then_last_use


@dataclass
class Lhu(SimpleEviction):
    """Counts outlive eviction; ties go by the older use. Without replicas every use is at full
    precision.

    A key is at full precision unless it was last fetched below 16 bits.
    """

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._is_high = np.ones(shape.num_keys, bool)
        self._uses = np.zeros(shape.num_keys, np.int64)
        self._last_use = never_used(shape)

    def fetched(self, bits: Mapping[int, int], now: Now) -> None:
        self._is_high[list(bits)] = [precision >= FULL_BITS for precision in bits.values()]

    def prefetched(self, keys: list[int], now: Now) -> None:
        self._is_high[keys] = True

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        self._uses[keys] += self._is_high[keys]
        self._last_use[keys] = now.step

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        return (rank_then_last_use(self._uses[keys], self._last_use[keys]),)
