"""How MoEpic's memory is best shared: each layer's budget, cache size and split ratio, from curves and latencies.

Shapes: L layers, E experts, Y ranks of predicted experts, at most E. Curves are `hit[l][C]`, `prediction[l][y]` and
`prediction_hit[l][y][C]` as `artifacts.traces.curves.Curves` has them, C from 0 to E, y from 0; windows are in seconds.
(Accelerating Mixture-of-Experts inference with adaptive expert split mechanism, Yan et al., 2025.)
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage

SOLVERS = ("greedy", "dynamic")
EVEN = "even"  # no solver: all layers alike
_NUM_CELLS, _NUM_WINDOWS = 2048, 256
_CLOSE = 1e-9

Answer = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Budgets, exposed seconds, theta and cache size of each layer."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds for one token of a layer but for its routed experts, of its k experts, of the head; of the bytes of an
    expert over the link, and of each transfer besides: of the link, and of the engine's work on it."""

    attention_s: float
    moe_s: float
    head_s: float
    load_s: float
    latency_s: float = 0.0
    host_s: float = 0.0

    def arguments(self) -> tuple[float, float, float, float]:
        """As the solvers take them, but for `besides`."""
        return self.head_s + self.attention_s, self.moe_s, self.attention_s, self.load_s

    @property
    def besides(self) -> dict[str, float]:
        """By keyword, what comes with every transfer."""
        return {"latency_s": self.latency_s, "host_s": self.host_s}


@dataclass(frozen=True, slots=True, eq=False)
class SolvedSplit:
    """A split, and what it was solved for: a budget of so many bytes, a machine (its name, or `here`), and over which
    `link` of it, None where it has but one. `source` says from what.

    `budgets` [L] in experts, `theta` [L]. By `latencies`, `solver` and `zeta` it can be solved anew.
    """

    budget_nbytes: int
    machine: str
    budgets: np.ndarray
    theta: np.ndarray
    latencies: Latencies | None = None
    solver: str = "dynamic"
    zeta: float = 0.01
    link: str | None = None
    source: str = ""

    def fits(self, machine: str, link: str | None) -> bool:
        """Whether it was solved for this machine, and for this link of it where one is given."""
        return self.machine == machine and (None in (link, self.link) or self.link == link)

    @property
    def made_for(self) -> str:
        return f"{self.machine} over {self.link}" if self.link else self.machine


def expert_split(
    budgets: ArrayLike,
    first_window: float,
    moe_s: float,
    attention_s: float,
    load_s: float,
    k: int,
    hit: ArrayLike,
    prediction: ArrayLike,
    prediction_hit: ArrayLike,
    *,
    latency_s: float = 0.0,
    host_s: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Exposed seconds [L], split ratio theta [L] in (0, 1] and cached experts [L], layer after layer, from the budget
    [L] of each in experts.

    Each layer takes the cache size at which most of a token's k experts are in the fast tier in time: cached, or
    prefetched within the window that the layer before leaves; of equals the smallest. Two things that the paper does
    not have come with every transfer, of which an absent expert takes two where experts are cut, a cached one one for
    its bottom: `latency_s` of the link, and `host_s` of whoever computes, which nothing hides and which prefetches cost
    too. Raises BadUsage.
    """
    times = (moe_s, attention_s, load_s, k, latency_s, host_s)
    problem = _Problem.of(first_window, times, hit, prediction, prediction_hit)
    return problem.answer(problem.checked(budgets))[1:]


def exposed_with(
    budgets: ArrayLike,
    cache_size: ArrayLike,
    first_window: float,
    moe_s: float,
    attention_s: float,
    load_s: float,
    k: int,
    hit: ArrayLike,
    prediction: ArrayLike,
    prediction_hit: ArrayLike,
    *,
    latency_s: float = 0.0,
    host_s: float = 0.0,
) -> np.ndarray:
    """Exposed seconds [L] where each layer caches so many experts [L] instead of the number that serves it best."""
    hit, prediction, cached = (np.asarray(curve, np.float64) for curve in (hit, prediction, prediction_hit))
    exposed, window = np.zeros(len(hit)), first_window
    for layer, (budget, size) in enumerate(zip(np.asarray(budgets), np.asarray(cache_size), strict=True)):
        theta = min(1.0, budget / size)
        of_absent = 2 if theta < 1 - _CLOSE else 1  # transfers; of a cached one, one less
        absent = 1 - cached[layer, :, size] * theta
        coming = of_absent - cached[layer, :, size]
        ranks = np.cumsum(absent * load_s + coming * latency_s) <= window
        covered = min(k, k * hit[layer, size] * theta + (absent * prediction[layer])[ranks].sum())
        foreseen = (coming * prediction[layer])[ranks].sum()
        on_demand = max(0.0, k * (of_absent - hit[layer, size]) - foreseen)
        hide_s, miss_s = covered * moe_s / k, (k - covered) * load_s + on_demand * latency_s
        exposed[layer] = max(0.0, miss_s - hide_s) + (on_demand + coming[ranks].sum()) * host_s
        window = moe_s - min(hide_s, miss_s) + attention_s
    return exposed


def allocate(
    total_budget: float,
    zeta: float,
    first_window: float,
    moe_s: float,
    attention_s: float,
    load_s: float,
    k: int,
    hit: ArrayLike,
    prediction: ArrayLike,
    prediction_hit: ArrayLike,
    *,
    solver: str = "greedy",
    latency_s: float = 0.0,
    host_s: float = 0.0,
) -> Answer:
    """Budgets [L] that add up to `total_budget` experts, at most all, and what `expert_split` makes of them.

    `greedy`, as published: from equal budgets, `zeta` of an expert goes from the layer that by itself loses least to
    the one that gains most, as long as the summed exposed time falls. `dynamic`: dynamic programming over a grid of
    budgets, carrying the window from layer to layer, then moves judged by the whole sum, and never worse than greedy.
    Raises BadUsage.
    """
    if solver not in SOLVERS:
        raise BadUsage(unknown("solver", solver, SOLVERS))
    times = (moe_s, attention_s, load_s, k, latency_s, host_s)
    problem = _Problem.of(first_window, times, hit, prediction, prediction_hit)
    budgets = problem.even(total_budget)
    if not zeta > 0:
        raise BadUsage(f"zeta, the share of an expert moved at a time, is above 0, not {zeta}")
    found = [problem.greedy(budgets, zeta)]
    if solver == "dynamic":
        found += [problem.refined(start, zeta) for start in (problem.gridded(budgets, zeta), found[0][0])]
    return min(found, key=lambda answer: answer[1].sum())


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """What there is to solve, as the kernels take it: hit [L, E + 1], prediction [L, Y], prediction_hit [L, E + 1, Y];
    seconds of a layer's experts, of its attention, of an expert's bytes, k, and of each transfer besides: of the link,
    and of whoever computes."""

    curves: tuple[np.ndarray, np.ndarray, np.ndarray]
    times: tuple[float, float, float, float, float, float]
    first_window: float

    @classmethod
    def of(
        cls,
        first_window: float,
        times: tuple[float, ...],
        hit: ArrayLike,
        prediction: ArrayLike,
        prediction_hit: ArrayLike,
    ) -> "_Problem":
        hit, prediction, cached = (np.asarray(curve, np.float64) for curve in (hit, prediction, prediction_hit))
        times = tuple(map(float, times))
        if not all(math.isfinite(time) and time >= 0 for time in (*times, first_window)):
            raise BadUsage("seconds and experts per token are finite and not negative")
        _check(hit, prediction, cached, times[3])
        curves = (hit, prediction, np.swapaxes(cached, 1, 2))
        return cls(tuple(map(np.ascontiguousarray, curves)), times, float(first_window))

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and experts."""
        num_layers, num_sizes = self.curves[0].shape
        return num_layers, num_sizes - 1

    def checked(self, budgets: ArrayLike) -> np.ndarray:
        budgets = np.array(budgets, np.float64)
        num_layers, num_experts = self.shape
        if budgets.shape != (num_layers,) or not ((budgets > 0) & (budgets <= num_experts)).all():
            raise BadUsage(f"budgets: one for each of {num_layers} layers, above 0 and at most {num_experts} experts")
        return budgets

    def even(self, total: float) -> np.ndarray:
        """The same for every layer."""
        num_layers, num_experts = self.shape
        return self.checked(np.full(num_layers, min(total / num_layers, num_experts)))

    def answer(self, budgets: np.ndarray) -> Answer:
        return self._solved("split", budgets)

    def greedy(self, budgets: np.ndarray, zeta: float) -> Answer:
        return self._solved("greedy", budgets, zeta)

    def refined(self, budgets: np.ndarray, zeta: float) -> Answer:
        """By moves of many steps first, then of fewer, down to one."""
        for doublings in range(int(math.log2(max(1.0, 1 / zeta))), -1, -1):
            budgets = self._solved("refine", budgets, zeta * 2**doublings)[0]
        return self.answer(budgets)

    def gridded(self, even: np.ndarray, zeta: float) -> np.ndarray:
        """The best budgets that are whole cells, what is left over where it serves best. So many cells are an expert,
        since a layer that holds whole ones needs no split."""
        from artifacts.splits.kernels import best_cells, tabulate

        num_layers, num_experts = self.shape
        cell = 1 / min(max(1, int(_NUM_CELLS / even.sum())), max(1, round(1 / zeta)))
        spare = math.floor(even.sum() / cell + _CLOSE) - num_layers  # the first of each layer is its own
        if spare < 0:
            return even
        values = cell * np.arange(1, round(num_experts / cell) + 1)
        table = tabulate(self.curves, self.times, values, self._windows())
        budgets = values[best_cells(self.times, table, self._windows(), self.first_window, spare)]
        rest = np.eye(num_layers) * max(0.0, even.sum() - budgets.sum())
        whole = [budgets + one for one in rest if (budgets + one <= num_experts + _CLOSE).all()]
        return min(whole, key=lambda some: self.answer(some)[1].sum())

    def _windows(self) -> np.ndarray:
        """From the least that a layer can leave to the most."""
        moe_s, attention_s, load_s, k, latency_s, _ = self.times
        hidden_s = load_s * moe_s / (load_s + moe_s / k) if moe_s else 0.0  # where loads and computing take as long
        hidden_s = moe_s if latency_s else hidden_s
        ends = [moe_s - hidden_s + attention_s, moe_s + attention_s, self.first_window]
        return np.unique(np.append(np.linspace(min(ends), max(ends), _NUM_WINDOWS), ends))

    def _solved(self, kernel: str, budgets: np.ndarray, *step: float) -> Answer:
        # Compiled code takes a while to load: only for who solves.
        from artifacts.splits import kernels as split_kernels

        budgets, exposed, sizes = budgets.copy(), np.zeros(len(budgets)), np.zeros(len(budgets), np.int64)
        windows = np.full(len(budgets) + 1, np.nan)
        windows[0] = self.first_window
        getattr(split_kernels, kernel)(self.curves, self.times, budgets, *step, windows, exposed, sizes)
        budgets = np.minimum(budgets, self.shape[1])
        return budgets, exposed, np.minimum(1.0, budgets / sizes), sizes


def _check(hit: np.ndarray, prediction: np.ndarray, cached: np.ndarray, k: float) -> None:
    """Raise BadUsage unless the curves are of the same layers and experts, and shares."""
    shapes = (hit.shape, prediction.shape, cached.shape)
    num_sizes = hit.shape[-1] if hit.ndim == 2 else 0
    if (
        prediction.shape[:1] != hit.shape[:1]
        or cached.shape != (*prediction.shape, num_sizes)
        or not 1 <= k < num_sizes
    ):
        raise BadUsage(f"curves of L layers and E experts are [L, E+1], [L, Y] and [L, Y, E+1], k 1 to E, not {shapes}")
    if not all(((curve >= 0) & (curve <= 1 + _CLOSE)).all() for curve in (hit, prediction, cached)):
        raise BadUsage("curves are shares: from 0 to 1")
