"""What each request of a shared pass is charged, so that the charges of all add up to the pass's counters.

A wanted expert counts for the requests that wanted it, in proportion to how many of their tokens did; so do its load
and the bytes of that. What belongs to no expert of the step (prefetched bytes, exposed stall, time) goes by
tokens.
"""

from dataclasses import astuple, dataclass

import numpy as np

from runtime.control.counters import Counter
from runtime.control.plan import Plan
from runtime.policies.step import Step


@dataclass(frozen=True, slots=True)
class Charge:
    """The part of one request in what its passes took."""

    requests: float = 0.0  # wanted experts
    loads: float = 0.0  # of them that came over the link for this step
    demand_bytes: float = 0.0
    prefetch_bytes: float = 0.0
    exposed_ms: float = 0.0
    seconds: float = 0.0

    @classmethod
    def whole(cls, counters: np.ndarray, *, exposed_s: float, seconds: float) -> "Charge":
        """All that a pass with these counters [F, L] took."""
        sums = counters[[Counter.REQUESTS, Counter.FETCHED, Counter.DEMAND_BYTES, Counter.PREFETCH_BYTES]].sum(axis=1)
        return cls(*map(float, sums), exposed_s * 1e3, seconds)

    def __add__(self, other: "Charge") -> "Charge":
        return Charge(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


class Charges:
    """Divides one pass after the other: `begin`, then `see` for each step that was planned, then `divide`."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts

    def begin(self, rows: np.ndarray, num_rows: int) -> None:
        """Begin a pass over tokens of the requests `rows` [T], each below `num_rows`."""
        self._rows, self._by_tokens = rows, np.bincount(rows, minlength=num_rows) / len(rows)
        # By layer, the part of each request; by tokens where nothing is noted.
        self._wanted: dict[int, np.ndarray] = {}
        self._loaded: dict[int, np.ndarray] = {}
        self._loaded_nbytes: dict[int, np.ndarray] = {}

    def see(self, step: Step, plan: Plan) -> None:
        """Note whose experts a step wanted, and whose it loaded."""
        num_rows, num_experts = len(self._by_tokens), self._num_experts
        cells = self._rows[:, None] * num_experts + step.selected
        counts = np.bincount(cells.ravel(), minlength=num_rows * num_experts).reshape(num_rows, num_experts)
        total = counts.sum(axis=0)
        parts = np.where(total > 0, counts / np.maximum(total, 1), self._by_tokens[:, None])
        self._wanted[step.layer] = parts[:, total > 0].mean(axis=1)
        if loads := [load for wave in plan.waves for load in wave.loads]:
            of_loads = parts[:, [load.key % num_experts for load in loads]]
            sizes = np.array([load.bits * load.share for load in loads])
            self._loaded[step.layer] = of_loads.mean(axis=1)
            self._loaded_nbytes[step.layer] = of_loads @ (sizes / sizes.sum())

    def divide(self, counters: np.ndarray, *, exposed_s: float, seconds: float) -> list[Charge]:
        """The charge of each request in a pass with these counters [F, L]."""
        columns = (
            self._divided(counters[Counter.REQUESTS], self._wanted),
            self._divided(counters[Counter.FETCHED], self._loaded),
            self._divided(counters[Counter.DEMAND_BYTES], self._loaded_nbytes),
            self._by_tokens * counters[Counter.PREFETCH_BYTES].sum(),
            self._by_tokens * exposed_s * 1e3,
            self._by_tokens * seconds,
        )
        return [Charge(*row) for row in np.stack(columns, axis=1).tolist()]

    def _divided(self, counts: np.ndarray, parts: dict[int, np.ndarray]) -> np.ndarray:
        """Counts [L] as the sum of each request's part over layers."""
        return sum(count * parts.get(layer, self._by_tokens) for layer, count in enumerate(counts.tolist()))
