"""Least cache priority (MoEpic): uses so far, discounted by the tokens since the last."""

from dataclasses import dataclass

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step


@dataclass
class Lcp(SimpleEviction):
    """The smallest `mu * rho ** (nu / omega)` is evicted first: mu uses so far, nu tokens since the last of them."""

    rho: float = 0.25
    omega: float = 128.0

    def __post_init__(self) -> None:
        if not 0 < self.rho <= 1 or self.omega <= 0:
            raise BadUsage(f"lcp needs 0 < rho <= 1 and omega > 0, not {self.rho} and {self.omega}")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._uses = np.zeros(shape.num_keys, np.int64)
        self._last_token = np.zeros(shape.num_keys, np.int64)

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        self._uses[keys] += 1
        self._last_token[keys] = now.num_tokens

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        age = now.num_tokens - self._last_token[keys]
        return (self._uses[keys] * self.rho ** (age / self.omega),)
