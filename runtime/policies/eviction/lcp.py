"""Least cache priority (MoEpic): uses so far, discounted by the tokens since the last."""

from dataclasses import dataclass

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step
from runtime.policies.eviction.shared import cells_and_view


@dataclass
class Lcp(SimpleEviction):
    """The smallest `mu * rho ** (nu / omega)` is evicted first: mu uses so far, nu tokens since the last of them."""

    rho: float = 0.25
    omega: float = 128.0

    def __post_init__(self) -> None:
        if not 0 < self.rho <= 1 or self.omega <= 0:
            raise BadUsage(f"lcp needs 0 < rho <= 1 and omega > 0, not {self.rho} and {self.omega}")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        zeros = np.zeros(shape.num_keys, np.int64)
        self._use_cells, self._uses = cells_and_view(zeros)
        self._last_cells, self._last_token = cells_and_view(zeros)
        self._worth_cells, self._worth = cells_and_view(zeros.astype(float))  # as of `_num_tokens`
        self._num_tokens = 0

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        uses, last_token, worth, num_tokens = self._use_cells, self._last_cells, self._worth_cells, now.num_tokens
        for key in keys:
            uses[key] += 1
            last_token[key] = num_tokens
            worth[key] = uses[key]

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        if now.num_tokens != self._num_tokens:  # once a pass
            self._num_tokens = now.num_tokens
            age = now.num_tokens - self._last_token
            self._worth[:] = self._uses * self.rho ** (age / self.omega)
        return (self._worth[keys],)
