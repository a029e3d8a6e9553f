"""MoEpic's solver in slow, plain Python: every sum is computed anew."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

CLOSE = 1e-9
FALLS = 1e-12

Transfers = tuple[
    float, float, float
]  # experts in time; overhead in seconds: of the link, of the engine's own work


class Plain:
    """A problem in the order of `expert_split`'s arguments; `latency_s` and `host_s` are the
    overhead of each transfer."""

    def __init__(
        self,
        window,
        moe_s,
        attention_s,
        load_s,
        k,
        hit,
        prediction,
        prediction_hit,
        *,
        latency_s=0.0,
        host_s=0.0,
    ) -> None:
        self.first_window = window
        self.moe_s = moe_s
        self.attention_s = attention_s
        self.load_s = load_s
        self.k = k
        self.hit = hit
        self.prediction = prediction
        self.prediction_hit = prediction_hit
        self.latency_s = latency_s
        self.host_s = host_s
        self.arguments = (window, moe_s, attention_s, load_s, k, hit, prediction, prediction_hit)
        self.least_change = FALLS * (load_s + latency_s + host_s)

    def covered(self, layer: int, budget: float, window: float) -> tuple[int, Transfers]:
        """The best cache size, the smallest of equals, and what is in time with it: loops in the
        order of the paper."""
        k = self.k
        best = -math.inf
        best_size = 0
        found = (0.0, 0.0, 0.0)
        for size in range(math.ceil(budget - CLOSE), len(self.hit[layer])):
            theta = min(1.0, budget / size)
            spent_s = 0.0
            prefetched = 0.0
            absent_transfers, cached_transfers = (2, 1) if theta < 1 - CLOSE / size else (1, 0)
            covered = k * self.hit[layer][size] * theta
            hits = self.hit[layer][size]
            transfers = k * (absent_transfers + hits * (cached_transfers - absent_transfers))
            for rank, right in enumerate(self.prediction[layer]):
                cached = self.prediction_hit[layer][rank][size]
                absent = 1 - cached * theta
                coming = absent_transfers + cached * (cached_transfers - absent_transfers)
                spent_s += absent * self.load_s + coming * self.latency_s
                if spent_s > window:
                    break
                covered += absent * right
                transfers -= coming * right
                prefetched += coming
            covered = min(k, covered)
            transfers = max(0, transfers)
            link_s = transfers * self.latency_s
            host_s = (transfers + prefetched) * self.host_s
            worth = covered
            if link_s + host_s:
                worth -= (link_s + host_s) / max(self.load_s + self.moe_s / k, 1e-30)
            if worth > best:
                best = worth
                best_size = size
                found = (covered, link_s, host_s)
        return best_size, found

    def after(self, covered: float, link_s: float, host_s: float) -> tuple[float, float]:
        """Exposed seconds, and the window that is left."""
        hide_s = covered * self.moe_s / self.k
        miss_s = (self.k - covered) * self.load_s + link_s
        return max(0.0, miss_s - hide_s) + host_s, self.moe_s - min(
            hide_s, miss_s
        ) + self.attention_s

    def split(
        self, budgets: Sequence[float]
    ) -> tuple[list[float], list[float], list[int], list[float]]:
        """Exposed seconds, theta, cache size and window of each layer."""
        exposed = []
        sizes = []
        windows = [self.first_window]
        for layer, budget in enumerate(budgets):
            size, found = self.covered(layer, budget, windows[-1])
            seconds, window = self.after(*found)
            exposed.append(seconds)
            sizes.append(size)
            windows.append(window)
        return (
            exposed,
            [budget / size for budget, size in zip(budgets, sizes, strict=True)],
            sizes,
            windows,
        )

    def exposed_s(self, budgets: Sequence[float]) -> float:
        """Exposed seconds of all layers."""
        return float(sum(self.split(budgets)[0]))

    def greedy(self, budgets: Sequence[float], step: float) -> list[float]:
        """As published: gains of all layers a step richer, losses of all a step poorer; first who
        gains, then who gives."""
        start = list(budgets)
        moved = [0] * len(budgets)
        while True:
            budgets = [one + count * step for one, count in zip(start, moved, strict=True)]
            exposed = self.split(budgets)[0]
            gains = {
                layer: exposed[layer] - other
                for layer, other in self._shifted(budgets, step).items()
            }
            losses = {
                layer: other - exposed[layer]
                for layer, other in self._shifted(budgets, -step).items()
            }
            receiver = max(gains, key=gains.get, default=None)
            losses.pop(receiver, None)
            giver = min(losses, key=losses.get, default=None)
            if None in (receiver, giver):
                return budgets
            moved[receiver] += 1
            moved[giver] -= 1
            after = [one + count * step for one, count in zip(start, moved, strict=True)]
            if self.change(budgets, after) >= -self.least_change:
                return budgets

    def _shifted(self, budgets: list[float], step: float) -> dict[int, float]:
        """Exposed seconds of the layers that can take a step, after all that can have taken it."""
        most = len(self.hit[0]) - 1 + CLOSE
        able = [layer for layer, budget in enumerate(budgets) if CLOSE < budget + step <= most]
        exposed = self.split(_with(budgets, dict.fromkeys(able, step)))[0]
        return {layer: exposed[layer] for layer in able}

    def change(self, budgets: Sequence[float], after: Sequence[float]) -> float:
        """The change of the summed exposed seconds."""
        pairs = zip(self.split(after)[0], self.split(budgets)[0], strict=True)
        return sum(new - old for new, old in pairs)

    def refined(self, budgets: Sequence[float], step: float) -> list[float]:
        """Steps from one of the three layers that lose least to one of the three that gain most."""
        budgets = list(budgets)
        num_experts = len(self.hit[0]) - 1
        while True:
            more = {}
            less = {}
            for layer, budget in enumerate(budgets):
                if budget + step <= num_experts + CLOSE:
                    more[layer] = self.change(budgets, _with(budgets, {layer: step}))
                if budget - step > CLOSE:
                    less[layer] = self.change(budgets, _with(budgets, {layer: -step}))
            few = itertools.product(sorted(more, key=more.get)[:3], sorted(less, key=less.get)[:3])
            moves = [
                _with(budgets, {one: step, other: -step}) for one, other in few if one != other
            ]
            best = min(moves, key=lambda move: self.change(budgets, move), default=budgets)
            if self.change(budgets, best) >= -self.least_change:
                return budgets
            budgets = best

    def cells(self, table: np.ndarray, windows: np.ndarray, num_cells: int) -> list[int]:
        """The cheapest way to spend every number of cells so far, with its window, layer after
        layer."""
        ways = {0: (0.0, self.first_window, [])}
        for layer in range(len(table)):
            new: dict[int, tuple[float, float, list[int]]] = {}
            for spent in sorted(ways):
                cost, window, cells = ways[spent]
                at = max([0, *np.flatnonzero(windows <= window)])
                for more in range(min(table.shape[1], num_cells - spent + 1)):
                    exposed, after = self.after(*table[layer, more, at])
                    if cost + exposed < new.get(spent + more, (math.inf,))[0]:
                        new[spent + more] = (cost + exposed, after, [*cells, more])
            ways = new
        return ways[num_cells][2]


def _with(budgets: list[float], changes: dict[int, float]) -> list[float]:
    return [budget + changes.get(layer, 0.0) for layer, budget in enumerate(budgets)]
