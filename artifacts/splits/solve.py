"""MoEpic's budget, cache size and split ratio of every layer, solved from curves and latencies.

Shapes: L layers, E experts, Y ranks of predicted experts, at most E. Curves are `hit[l][C]`,
`prediction[l][y]` and `prediction_hit[l][y][C]` as in `artifacts.traces.curves.Curves`, C from 0 to
E, y from 0; windows are in seconds. (Accelerating Mixture-of-Experts inference with adaptive expert
split mechanism, Yan et al., 2025.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage

SOLVERS = ("greedy", "dynamic")
EVEN = "even"  # no solver: all layers alike
_NUM_CELLS = 2048
_NUM_WINDOWS = 256
_CLOSE = 1e-9
_GRAIN = 0.01  # experts: the least that `dynamic` moves

Times = tuple[float, float, float, float, float, float]
"""Times that the kernels take, in seconds: of a layer's k experts, of its attention and of loading
an expert's bytes; then k; then the overhead of each transfer in seconds, on the link and of the
engine's own work."""

Answer = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Budgets, exposed seconds, theta and cache size of each layer."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Times in seconds. For one token: `attention_s` of a layer without its routed experts, `moe_s`
    of its k experts, `head_s` of the head. `load_s` is for loading the bytes of an expert. The
    overhead of each transfer is `latency_s` on the link and `host_s` of the engine's own work."""

    attention_s: float
    moe_s: float
    head_s: float
    load_s: float
    latency_s: float = 0.0
    host_s: float = 0.0

    @property
    def first_window(self) -> float:
        """Seconds in which the first layer's experts can be prefetched."""
        return self.head_s + self.attention_s

    def times(self, k: int) -> Times:
        """The seconds as the kernels take them, for k experts per token."""
        return self.moe_s, self.attention_s, self.load_s, k, self.latency_s, self.host_s


@dataclass(frozen=True, slots=True, eq=False)
class SolvedSplit:
    """A split, and what it was solved for: a budget in bytes, a machine (its name, or `here`), and
    one of its links, or None where the machine has only one. `source` names the data it was solved
    from.

    `budgets` [L] in experts, `theta` [L]; `zeta` as `allocate` takes it. With `latencies`, `solver`
    and `zeta` it can be solved again.
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
        """Return whether it was solved for this machine and this link; a link of None, here or in
        the split, fits any."""
        return self.machine == machine and (None in (link, self.link) or self.link == link)

    @property
    def made_for(self) -> str:
        return f"{self.machine} over {self.link}" if self.link else self.machine


@dataclass(frozen=True, slots=True, eq=False)
class SplitProblem:
    """Problem as the kernels take it. `curves` are hit [L, E + 1], prediction [L, Y] and
    prediction_hit [L, E + 1, Y] (the last two axes swapped), `times` is a `Times`. `first_window`
    is the window of the first layer in seconds."""

    curves: tuple[np.ndarray, np.ndarray, np.ndarray]
    times: Times
    first_window: float

    @classmethod
    def of(cls, first_window: float, times: Times, curves: Sequence[ArrayLike]) -> "SplitProblem":
        """Build from the curves hit, prediction and prediction_hit. Raises BadUsage where they or
        the times are impossible."""
        hit, prediction, cached = (np.asarray(curve, np.float64) for curve in curves)
        times = tuple(map(float, times))
        if not all(math.isfinite(time) and time >= 0 for time in (*times, first_window)):
            raise BadUsage("seconds and experts per token are finite and not negative")
        _check(hit, prediction, cached, times[3])
        by_size = (hit, prediction, np.swapaxes(cached, 1, 2))
        return cls(tuple(map(np.ascontiguousarray, by_size)), times, float(first_window))

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and experts."""
        num_layers, num_sizes = self.curves[0].shape
        return num_layers, num_sizes - 1

    def split(self, budgets: ArrayLike) -> Answer:
        """The best cache size of every layer for these budgets [L] in experts. Raises BadUsage."""
        return self.answer(self._checked(budgets))

    def exposed_with(self, budgets: ArrayLike, cache_size: ArrayLike) -> np.ndarray:
        """Return the exposed seconds [L] where each layer caches `cache_size` experts [L] instead
        of the number that serves it best."""
        moe_s, attention_s, load_s, k, latency_s, host_s = self.times
        exposed = np.zeros(self.shape[0])
        window = self.first_window
        layers = zip(*self.curves, np.asarray(budgets), np.asarray(cache_size), strict=True)
        for layer, (hit, prediction, cached, budget, size) in enumerate(layers):
            theta = min(1.0, budget / size)
            of_absent = 2 if theta < 1 - _CLOSE else 1  # transfers; a cached expert takes one less
            absent = 1 - cached[size] * theta
            coming = of_absent - cached[size]
            ranks = np.cumsum(absent * load_s + coming * latency_s) <= window
            covered = min(k, k * hit[size] * theta + (absent * prediction)[ranks].sum())
            foreseen = (coming * prediction)[ranks].sum()
            on_demand = max(0.0, k * (of_absent - hit[size]) - foreseen)
            hide_s = covered * moe_s / k
            miss_s = (k - covered) * load_s + on_demand * latency_s
            exposed[layer] = max(0.0, miss_s - hide_s) + (on_demand + coming[ranks].sum()) * host_s
            window = moe_s - min(hide_s, miss_s) + attention_s
        return exposed

    def allocate(self, total_budget: float, zeta: float, *, solver: str) -> Answer:
        """Share `total_budget` experts among the layers; see the function `allocate`. Raises
        BadUsage."""
        if solver not in SOLVERS:
            raise BadUsage(unknown("solver", solver, SOLVERS))
        budgets = self.even(total_budget)
        if not 0 < zeta <= 1:
            raise BadUsage(
                "zeta, the share of the budget that greedy moves at a time, is above 0, at most "
                f"1, not {zeta}"
            )
        found = self.greedy(budgets, zeta * budgets.sum())
        return found if solver == "greedy" else self.dynamic(budgets, found, _GRAIN)

    def dynamic(self, even: np.ndarray, greedy: Answer, step: float) -> Answer:
        """Return the best of greedy's answer and the answers that moves of at least `step` experts
        make of it and of a grid's best."""
        starts = (self.gridded(even, step), greedy[0])
        return min(
            [greedy, *(self.refined(start, step) for start in starts)],
            key=lambda answer: answer[1].sum(),
        )

    def even(self, total: float) -> np.ndarray:
        """Equal budgets [L] that add up to `total` experts, at most all. Raises BadUsage."""
        num_layers, num_experts = self.shape
        return self._checked(np.full(num_layers, min(total / num_layers, num_experts)))

    def answer(self, budgets: np.ndarray) -> Answer:
        """The answer for budgets [L] that are known to be possible."""
        return self.run_kernel("split", budgets)

    def greedy(self, budgets: np.ndarray, step: float) -> Answer:
        """Return the answer of the published algorithm (Algorithm 1), from these budgets, with
        steps of `step` experts."""
        return self.run_kernel("greedy", budgets, step)

    def refined(self, budgets: np.ndarray, step: float) -> Answer:
        """The answer after moves judged by the whole sum: first of many steps, then of fewer, down
        to one."""
        for doublings in range(int(math.log2(max(1.0, 1 / step))), -1, -1):
            budgets = self.run_kernel("refine", budgets, step * 2**doublings)[0]
        return self.answer(budgets)

    def gridded(self, even: np.ndarray, step: float) -> np.ndarray:
        """The best budgets [L] that are whole cells; what is left over goes to the layer where it
        serves best.

        An expert is a whole number of cells, since a layer that holds whole experts needs no split.
        """
        from artifacts.splits.kernels import best_cells, tabulate

        num_layers, num_experts = self.shape
        cell = 1 / min(max(1, int(_NUM_CELLS / even.sum())), max(1, round(1 / step)))
        # every layer has one cell already
        spare = math.floor(even.sum() / cell + _CLOSE) - num_layers
        if spare < 0:
            return even
        values = cell * np.arange(1, round(num_experts / cell) + 1)
        windows = self.window_grid()
        table = tabulate(self.curves, self.times, values, windows)
        budgets = values[best_cells(self.times, table, windows, self.first_window, spare)]
        rest = np.eye(num_layers) * max(0.0, even.sum() - budgets.sum())
        choices = [
            budgets + extra for extra in rest if (budgets + extra <= num_experts + _CLOSE).all()
        ]
        return min(choices, key=lambda choice: self.answer(choice)[1].sum())

    def window_grid(self) -> np.ndarray:
        """Windows in seconds, ascending, from the shortest that a layer can leave to the
        longest."""
        moe_s, attention_s, load_s, k, latency_s, _ = self.times
        # where loads and computing take as long
        hidden_s = load_s * moe_s / (load_s + moe_s / k) if moe_s else 0.0
        hidden_s = moe_s if latency_s else hidden_s
        ends = [moe_s - hidden_s + attention_s, moe_s + attention_s, self.first_window]
        return np.unique(np.append(np.linspace(min(ends), max(ends), _NUM_WINDOWS), ends))

    def run_kernel(self, kernel: str, budgets: np.ndarray, *step: float) -> Answer:
        """Run one compiled loop of `artifacts.splits.kernels` from these budgets."""
        # Compiled code takes a while to load: it is imported only where something is solved.
        from artifacts.splits import kernels

        budgets, exposed, sizes = (
            budgets.copy(),
            np.zeros(len(budgets)),
            np.zeros(len(budgets), np.int64),
        )
        windows = np.full(len(budgets) + 1, np.nan)
        windows[0] = self.first_window
        getattr(kernels, kernel)(self.curves, self.times, budgets, *step, windows, exposed, sizes)
        budgets = np.minimum(budgets, self.shape[1])
        return budgets, exposed, np.minimum(1.0, budgets / sizes), sizes

    def _checked(self, budgets: ArrayLike) -> np.ndarray:
        budgets = np.array(budgets, np.float64)
        num_layers, num_experts = self.shape
        if budgets.shape != (num_layers,) or not ((budgets > 0) & (budgets <= num_experts)).all():
            raise BadUsage(
                f"budgets: one for each of {num_layers} layers, above 0 and at most {num_experts} "
                "experts"
            )
        return budgets


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
    """Return exposed seconds [L], split ratio theta [L] in (0, 1] and cached experts [L], layer
    after layer, from the budget [L] of each in experts.

    Each layer takes the cache size at which most of a token's k experts are in the fast tier in
    time: cached, or prefetched within the window that the layer before leaves; of equal sizes the
    smallest. Every transfer has two overheads that the paper does not have: `latency_s` on the
    link, and `host_s` of the engine's own work. Nothing hides the latter, and prefetches cost it
    too. Where experts are cut, an absent expert takes two transfers and a cached one takes one, for
    its bottom. Raises BadUsage.
    """
    times = (moe_s, attention_s, load_s, k, latency_s, host_s)
    return SplitProblem.of(first_window, times, (hit, prediction, prediction_hit)).split(budgets)[
        1:
    ]


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
    """Return budgets [L] that add up to `total_budget` experts, at most all, and the results of
    `expert_split` for them.

    `greedy`, as published (Algorithm 1), starts from equal budgets and goes on as long as the
    summed exposed time falls. Each time, `zeta` of the whole budget goes to the layer that gains
    most when all layers get that much more. It comes from the other layer that loses least when all
    get that much less.

    `dynamic` is dynamic programming over a grid of budgets, carrying the window from layer to
    layer. Moves of hundredths of an expert or more follow, judged by the whole sum, also from where
    greedy ended; it is never worse than greedy. Raises BadUsage.
    """
    times = (moe_s, attention_s, load_s, k, latency_s, host_s)
    problem = SplitProblem.of(first_window, times, (hit, prediction, prediction_hit))
    return problem.allocate(total_budget, zeta, solver=solver)


def _check(hit: np.ndarray, prediction: np.ndarray, cached: np.ndarray, k: float) -> None:
    """Raise BadUsage unless the curves have the same layers and experts and all their values are
    shares."""
    shapes = (hit.shape, prediction.shape, cached.shape)
    num_sizes = hit.shape[-1] if hit.ndim == 2 else 0
    if (
        prediction.shape[:1] != hit.shape[:1]
        or cached.shape != (*prediction.shape, num_sizes)
        or not 1 <= k < num_sizes
    ):
        raise BadUsage(
            "curves of L layers and E experts are [L, E+1], [L, Y] and [L, Y, E+1], k 1 to E, "
            f"not {shapes}"
        )
    if not all(((curve >= 0) & (curve <= 1 + _CLOSE)).all() for curve in (hit, prediction, cached)):
        raise BadUsage("curves are shares: from 0 to 1")
