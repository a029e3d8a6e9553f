"""Compute a given share of the misses near, and fetch the others (llama.cpp's
`--moe-cache-cpu-share`; lossless)."""

from dataclasses import dataclass

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Choice, Residents, Simple, Step


@dataclass
class Share(Simple):
    """Computes the share `near` of a step's misses near, once its scope has no empty slot; until
    then all are fetched. What is computed near is not brought. A step of more than `tokens` tokens
    bypasses the cache: it fetches nothing.

    Source: llama.cpp, docs/moe-cache.md at b12191, and src/llama-moe-cache.cpp at 4b060f27, in
    which `max_batch` is 32. Readings, since the code of the share was not to be had: the share is
    kept over all steps, not in each (its tuner tells .95 from .98, which no step of ten misses
    does), and the misses of most tokens are fetched, the first wanted among equals. A step that
    bypasses the cache uploads its misses beside it there; here they are computed near.
    """

    near: float = 0.5
    tokens: float = 32.0

    def __post_init__(self) -> None:
        if not (0 <= self.near <= 1 and self.tokens >= 0):
            raise BadUsage(
                f"share needs near in 0..1 and tokens >= 0, not {self.near} and {self.tokens}"
            )

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._due = 0.0  # misses to fetch

    def choose(self, step: Step, residents: Residents) -> Choice:
        missing = residents.missing(step)
        if len(step.selected) > self.tokens:
            return Choice(step.selected, near=frozenset(missing))
        if any(residents.num_free):
            return Choice(step.selected)
        self._due += (1 - self.near) * len(missing)
        fetched = int(np.floor(self._due + 1e-9))
        self._due -= fetched
        return Choice(step.selected, near=frozenset(missing[fetched:]))
