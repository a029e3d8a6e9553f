"""Least cache priority (MoEpic): uses so far, discounted by the tokens since the last."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Now, SimpleEviction, Step, check_choice
from runtime.policies.eviction.shared import cells_and_view


@dataclass
class Lcp(SimpleEviction):
    """The smallest `mu * rho ** (nu / omega)` is evicted first: mu uses so far, nu tokens since the
    last of them.

    `uses` counts the `passes` that use an expert, so that a prompt is one use, or, as published,
    the `tokens` that do.
    """

    rho: float = 0.25
    omega: float = 128.0
    uses: str = "passes"

    def __post_init__(self) -> None:
        check_choice("lcp", "uses", self.uses, "passes", "tokens")
        if not 0 < self.rho <= 1 or self.omega <= 0:
            raise BadUsage(f"lcp needs 0 < rho <= 1 and omega > 0, not {self.rho} and {self.omega}")

    @property
    def as_lcp(self) -> Mapping[str, object]:
        """Its own parameters."""
        return asdict(self)

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        self._num_experts = shape.num_experts
        zeros = np.zeros(shape.num_keys, np.int64)
        self._use_cells, self._uses = cells_and_view(zeros)
        self._last_cells, self._last_token = cells_and_view(zeros)
        self._worth_cells, self._worth = cells_and_view(zeros.astype(float))  # as of `_num_tokens`
        self._num_tokens = 0

    def used(self, keys: list[int], step: Step, now: Now) -> None:
        if self.uses == "tokens" and len(step.selected) > 1:
            self._used_by_tokens(keys, step, now)
            return
        uses = self._use_cells
        last_token = self._last_cells
        worth = self._worth_cells
        num_tokens = now.num_tokens
        for key in keys:
            uses[key] += 1
            last_token[key] = num_tokens
            worth[key] = uses[key]

    def _used_by_tokens(self, keys: list[int], step: Step, now: Now) -> None:
        """Note each token's use. A token that selects an expert twice uses it once; a stand-in,
        which no token selected, is used by the last."""
        num_experts = self._num_experts
        before = now.num_tokens - len(step.selected)
        for key in keys:
            rows = np.flatnonzero((step.selected == key % num_experts).any(axis=1))
            self._use_cells[key] += max(1, len(rows))
            self._last_cells[key] = before + int(rows[-1]) + 1 if len(rows) else now.num_tokens
        self._num_tokens = -1  # what the keys are worth is no longer known

    def order(self, keys: np.ndarray, now: Now) -> tuple[np.ndarray, ...]:
        if now.num_tokens != self._num_tokens:  # once a pass, as a rule
            self._num_tokens = now.num_tokens
            age = now.num_tokens - self._last_token
            self._worth[:] = self._uses * self.rho ** (age / self.omega)
        return (self._worth[keys],)
