"""SpecMD, Figures 5 and 6: collisions by layer, and prefetching by top-k beside that by score."""

from collections.abc import Iterator, Sequence

import numpy as np

from artifacts.modelshapes.known import MODELS
from artifacts.traces.trace import DECODE, Trace
from moectl.show.render import Sheet
from runtime.control.counters import hit_rate
from runtime.control.serving import Service
from runtime.policies.prefetch.score import ScorePrefetch
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload
from tools.reproductions.judged import above, by_seed, number
from tools.reproductions.report import Claim
from tools.reproductions.specmd import figures as paper
from tools.reproductions.specmd.bench import FEW, LAYER_EXPERTS, num_held, workload

OLMOE = "olmoe-1b-7b"
EXCEPTION = "mixtral-8x7b"
BY_LAYER = ("least_stale", "lru", "score")
WAYS = ("next_gate", "score", "random", "none")
_NEAR_ZERO = 1.0  # per cent
_MORE = 0.02  # of a hit rate
_WIDE = tuple(name for name in LAYER_EXPERTS if name != EXCEPTION)
_PERCENT = number(".1f", " %")

Pairs = dict[str, tuple[float, float]]  # by way of predicting: precision and recall


class Foresight:
    """Replays of one seed: OLMoE at 1 % by eviction, all shapes at 5 % by prefetching."""

    def __init__(self, seed: int) -> None:
        workloads = {name: workload(name, FEW, seed) for name in LAYER_EXPERTS}
        self.by_layer = {eviction: _collisions(workloads[OLMOE], eviction) for eviction in BY_LAYER}
        self.outcomes = {
            name: {way: _prefetched(one, name, way) for way in WAYS}
            for name, one in workloads.items()
        }
        self.pairs = {
            name: _pairs(one.trace, MODELS[name].shape.top_k) for name, one in workloads.items()
        }

    def more(self, way: str, quantity: int, over: str = "next_gate") -> list[float]:
        """Return how much more of `quantity`, 0 hit rate and 1 seconds of stalls, a way has in each
        shape but Mixtral's."""
        return [
            self.outcomes[name][way][quantity] - self.outcomes[name][over][quantity]
            for name in _WIDE
        ]

    def ahead(self, way: str, place: int) -> list[float]:
        """Return how far the precision (0) or recall (1) of a way is above that of `score`, in all
        four shapes."""
        return [pairs[way][place] - pairs["score"][place] for pairs in self.pairs.values()]


def _collisions(of: Workload, eviction: str) -> np.ndarray:
    """Return collisions in per cent of the requests, by layer [L]."""
    policies = {"eviction": eviction, "prefetch": "score"}
    budget = f"{num_held(OLMOE, FEW, 1)}x"
    setting = Setting(
        eviction, policies=policies, scope="global", budget=budget, serving=Service.ONE_BY_ONE
    )
    layers = of.run(setting).by_layer
    return np.array([100 * layer["collisions"] / layer["requests"] for layer in layers])


def _prefetched(of: Workload, name: str, way: str) -> tuple[float, float]:
    """Return the hit rate, and seconds that compute waits for loads."""
    policies = {"eviction": "least_stale", "prefetch": way}
    budget = f"{num_held(name, FEW, 5)}x"
    outcome = of.run(
        Setting(way, policies=policies, scope="global", budget=budget, serving=Service.ONE_BY_ONE)
    )
    return hit_rate(outcome.counters), outcome.times["exposed_ms"] / 1e3


def _pairs(trace: Trace, top_k: int) -> Pairs:
    """Return precision and recall of what is predicted of decoded tokens one layer ahead, by way of
    choosing: the top k, those that `score` proposes, and k at random."""
    rows = trace.take(trace.phase == DECODE)
    order = np.lexsort((rows.layer, rows.token, rows.request))
    here = order[:-1][rows.layer[order[1:]] == rows.layer[order[:-1]] + 1]
    then = order[1:][rows.layer[order[1:]] == rows.layer[order[:-1]] + 1]
    predicted = rows.predicted[here, 0]
    wanted = np.zeros(predicted.shape, bool)
    np.put_along_axis(wanted, rows.experts[then].astype(int), True, axis=1)
    drawn = np.random.default_rng(0).random(predicted.shape)
    bar = np.percentile(predicted, ScorePrefetch.percentile, axis=1, keepdims=True)
    chosen = {
        "next_gate": _top(predicted, top_k),
        "score": predicted > bar,
        "random": _top(drawn, top_k),
    }
    return {
        way: (float(wanted[named].mean()), float(named[wanted].mean()))
        for way, named in chosen.items()
    }


def _top(scores: np.ndarray, count: int) -> np.ndarray:
    """Return [N, E] bool, the `count` largest of each row."""
    return (-scores).argsort(axis=1).argsort(axis=1) < count


def sheets(one: Foresight) -> dict[str, Sheet]:
    """Return both figures' tables, of one seed."""
    layers = [(eviction, *rates.round(1).tolist()) for eviction, rates in one.by_layer.items()]
    numbers = range(len(layers[0]) - 1)
    rows = [
        (name, way, *one.outcomes[name][way], *one.pairs[name].get(way, (None, None)))
        for name in LAYER_EXPERTS
        for way in WAYS
    ]
    columns = ("shape", "prefetch", "hit rate", "stalls, s", "precision", "recall")
    return {
        "layers": Sheet(
            "Figure 5: collisions of OLMoE at 1 %, % of the requests by layer",
            ("eviction", *(f"layer {number}" for number in numbers)),
            layers,
        ),
        "foresight": Sheet("Figure 6: at 5 %, least_stale evicts", columns, rows),
    }


def claims(seeds: Sequence[Foresight]) -> Iterator[Claim]:
    """Yield the statements on both figures."""
    yield from _of_layers(seeds)
    shapes = ", ".join(_WIDE)
    yield by_seed(
        "Figure 6: score hits more than top-k, but for Mixtral (5.3)",
        f"in {shapes}",
        [one.more("score", 0) for one in seeds],
        off="random experts for score's",
        null=[one.more("random", 0) for one in seeds],
        test=lambda ours: bool((ours > _MORE).all()),
        form=_signed,
    )
    yield by_seed(
        "Figure 6: score waits less for loads than top-k, but for Mixtral, s (5.3)",
        f"in {shapes}",
        [one.more("score", 1) for one in seeds],
        off="random experts for score's",
        null=[one.more("random", 1) for one in seeds],
        test=lambda ours: bool((ours < 0).all()),
        form=_signed,
    )
    for place, what in enumerate(("precision", "recall")):
        yield by_seed(
            f"Figure 6: top-k predicts with a higher {what} than score (5.3)",
            "in all four",
            [one.ahead("next_gate", place) for one in seeds],
            off="k experts at random",
            null=[one.ahead("random", place) for one in seeds],
            test=lambda ours: bool((ours >= 0).all() and (ours > _MORE).sum() >= len(ours) - 1),
            form=_signed,
        )


def _of_layers(seeds: Sequence[Foresight]) -> Iterator[Claim]:
    low, high = paper.DEEPER
    for eviction in ("lru", "score"):
        yield by_seed(
            f"Figure 5: collisions of {eviction} in the deeper half, OLMoE at 1 % (5.2)",
            f"{low:g} to {high:g} %",
            [_half(one, eviction, 1) for one in seeds],
            off="Least-Stale in its place",
            null=[_half(one, "least_stale", 1) for one in seeds],
            test=lambda ours: bool(low / 2 <= ours <= 2 * high),
            form=_PERCENT,
        )
    yield by_seed(
        "Figure 5: Least-Stale's collisions are near zero in all layers, most of any (5.2)",
        "yes",
        [one.by_layer["least_stale"].max() for one in seeds],
        off="lru in its place",
        null=[one.by_layer["lru"].max() for one in seeds],
        test=lambda ours: bool(ours <= _NEAR_ZERO),
        form=_PERCENT,
    )
    yield by_seed(
        "Figure 5: LRU's collisions accumulate along the pass: deeper half less the other (5.2)",
        "yes",
        [_half(one, "lru", 1) - _half(one, "lru", 0) for one in seeds],
        off="Least-Stale in its place",
        null=[_half(one, "least_stale", 1) - _half(one, "least_stale", 0) for one in seeds],
        test=above(_NEAR_ZERO),
        form=number("+.1f", " points"),
    )


def _half(one: Foresight, eviction: str, place: int) -> float:
    return float(np.array_split(one.by_layer[eviction], 2)[place].mean())


def _signed(ours: np.ndarray) -> str:
    return " ".join(f"{value:+.3g}" for value in ours)
