"""Charges of the requests of a shared pass, which add up to the pass's counters.

A wanted expert counts for the requests that wanted it, in proportion to how many of their tokens
did. The same holds for the way it was served: a load and its bytes, another tier, or nothing.
Amounts that belong to no expert of the step (prefetches, evictions, exposed stall, time) are
divided by tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.control.counters import AT_BITS, Counter
from runtime.control.plan import Place, Plan
from runtime.policies.step import Step

_REST = (Counter.HITS, Counter.LATE, Counter.SPARED)
_WANTED = (
    *(Counter[name.upper()] for name in AT_BITS.values()),
    Counter.REPLACED_RANKS,
    Counter.DROPPED_RANKS,
)
_MISSED = (Counter.FETCHED, Counter.NEAR, Counter.LOW, Counter.SPARED)


@dataclass(frozen=True, slots=True, eq=False)
class Charge:
    """The share of one request in its passes: counters [F, L] by counter and layer, which are
    fractions for a shared pass; the seconds for which compute waited for the link; the seconds of
    the passes; and the passes, each by the request's share of it."""

    counters: np.ndarray = field(default_factory=lambda: np.zeros((len(Counter), 1), np.int64))
    exposed_s: float = 0.0
    seconds: float = 0.0
    passes: float = 0.0

    def __add__(self, other: "Charge") -> "Charge":
        return Charge(
            self.counters + other.counters,
            self.exposed_s + other.exposed_s,
            self.seconds + other.seconds,
            self.passes + other.passes,
        )


class Charges:
    """Divides one pass after the other: `begin`, then `see` for each step that was planned, then
    `divide`."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts

    def begin(self, rows: np.ndarray, num_rows: int) -> None:
        """Begin a pass over tokens of the requests `rows` [T], each below `num_rows`."""
        self._rows = rows
        self._by_tokens = np.bincount(rows, minlength=num_rows) / len(rows)
        self._parts: dict[
            int, dict[Counter, np.ndarray]
        ] = {}  # by layer; by tokens where nothing is noted

    def see(self, step: Step, plan: Plan) -> None:
        """Note which requests wanted the experts of a step, and how these experts were served."""
        num_rows = len(self._by_tokens)
        num_experts = self._num_experts
        if num_rows == 1:
            return  # all of it
        cells = self._rows[:, None] * num_experts + step.selected
        counts = np.bincount(cells.ravel(), minlength=num_rows * num_experts).reshape(
            num_rows, num_experts
        )
        total = counts.sum(axis=0)
        # [R, E]
        parts = np.where(total > 0, counts / np.maximum(total, 1), self._by_tokens[:, None])
        is_wanted = total > 0
        loads = [load for wave in plan.waves for load in wave.loads]
        absent = {Counter.FETCHED: loads, Counter.NEAR: plan.near, Counter.LOW: plan.low}
        is_rest = is_wanted.copy()
        is_rest[[place.key % num_experts for places in absent.values() for place in places]] = False
        noted = dict.fromkeys(_WANTED, _mean(parts, is_wanted)) | dict.fromkeys(
            _REST, _mean(parts, is_rest)
        )
        for counter, places in absent.items():
            noted[counter] = self._of_places(parts, places)
        noted[Counter.DEMAND_BYTES] = self._of_places(parts, loads, by_size=True)
        self._parts[step.layer] = {
            counter: part for counter, part in noted.items() if part is not None
        }

    def divide(
        self,
        counters: np.ndarray,
        *,
        exposed_s: float,
        seconds: float,
        own: Mapping[Counter, Sequence[int]],
    ) -> list[Charge]:
        """Return the charge of each request in a pass with these counters [F, L]. Of some counters,
        in the first layer, `own` has what each request counted [R]."""
        divided = self._by_tokens[:, None, None] * counters
        for layer, noted in self._parts.items():
            for counter, part in noted.items():
                divided[:, counter, layer] = part * counters[counter, layer]
        divided[:, Counter.MISSES] = divided[:, _MISSED].sum(axis=1)
        divided[:, Counter.REQUESTS] = divided[:, (Counter.HITS, Counter.LATE, Counter.MISSES)].sum(
            axis=1
        )
        for counter, counts in own.items():
            divided[:, counter, 0] = counts
        parts = self._by_tokens.tolist()
        return [
            Charge(table, exposed_s * part, seconds * part, part)
            for table, part in zip(divided, parts, strict=True)
        ]

    def _of_places(
        self, parts: np.ndarray, places: Sequence[Place], *, by_size: bool = False
    ) -> np.ndarray | None:
        """Return the share [R] of each request in the experts at `places`; None where there are
        none. With `by_size` experts are weighted by their size."""
        if not places:
            return None
        weights = np.array([place.bits * place.share if by_size else 1.0 for place in places])
        return parts[:, [place.key % self._num_experts for place in places]] @ (
            weights / weights.sum()
        )


def _mean(parts: np.ndarray, is_chosen: np.ndarray) -> np.ndarray | None:
    return parts[:, is_chosen].mean(axis=1) if is_chosen.any() else None
