"""fMoE, Figures 3c, 4, 8, 12a and 14a: what the search of stored maps finds, on requests that are
not among them.

Shapes: I iterations, R requests, B resamplings of them, N maps, L layers, E experts, k selected.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from artifacts.routing.expert_maps import best_matches
from artifacts.traces.trace import DECODE, Trace
from moectl.show.render import Sheet
from runtime.replay import from_trace
from tools.reproductions.fmoe.folds import Folds
from tools.reproductions.fmoe.replays import HITS, FmoeReplays
from tools.reproductions.judged import above, by_request, derived, left_out, number
from tools.reproductions.report import NOT_TESTABLE, UNKNOWN, Claim

CAPACITIES = (125, 250, 500, 1000)
LENGTHS = (1, 4, 16, 48)  # iterations of a request that are aggregated
_MORE = 0.1  # "significantly higher", "drastically"
_CLOSE = 0.1  # a correlation
_KINDS = ("semantic", "trajectory")


@dataclass(frozen=True, slots=True)
class Found:
    """Of each decoded iteration [I]: its request, and by search the score of the best map and the
    share of the iteration's experts that are among the k that this map names."""

    request: np.ndarray
    scores: dict[str, np.ndarray]
    hits: dict[str, np.ndarray]

    def weights(self, folds: Folds) -> np.ndarray:
        """Return how often each iteration counts [B, I]."""
        return folds.weights[:, self.request]


@dataclass(frozen=True)
class Searches:
    """Searches by capacity of the store, and replays that the figures take besides those of all
    figures."""

    replays: FmoeReplays

    @cached_property
    def by_capacity(self) -> dict[int, Found]:
        return {capacity: searched(self.replays.folds, capacity) for capacity in CAPACITIES}

    @cached_property
    def coarse(self) -> dict[int, np.ndarray]:
        """Hit rates [B] of prefetching what the request used most, by distance."""
        return {ahead: self._hits(f"frequency:distance={ahead}") for ahead in self.replays.hits_at}

    @cached_property
    def speculated(self) -> dict[int, np.ndarray]:
        """Hit rates [B] of asking the router that far ahead."""
        most = self.replays.folds.trace.predicted.shape[1]
        return {ahead: self._hits(f"next_gate:distance={ahead}") for ahead in range(1, most + 1)}

    def _hits(self, prefetch: str) -> np.ndarray:
        folds = self.replays.folds
        found = folds.run(conditions=HITS, prefetch=prefetch, eviction="lfu")
        return found.hit_rate(folds.weights)


def searched(folds: Folds, capacity: int) -> Found:
    """Search every decoded iteration in maps of other requests, at most `capacity`."""
    parts = [_searched(fold.replayed, fold.maps_of(capacity), folds) for fold in folds.parts]
    return Found(
        np.concatenate([part.request for part in parts]),
        *(
            {kind: np.concatenate([getattr(part, name)[kind] for part in parts]) for kind in _KINDS}
            for name in ("scores", "hits")
        ),
    )


def _searched(trace: Trace, maps: from_trace.ExpertMaps, folds: Folds) -> Found:
    shape = folds.model.shape
    embeddings, probabilities = from_trace.iterations(trace, shape)
    numbers, first = np.unique(trace.iteration, return_index=True)
    is_decoded = trace.phase[first] == DECODE
    rows = np.flatnonzero(trace.phase == DECODE)
    rows = rows[np.lexsort((trace.layer[rows], trace.iteration[rows]))]
    wanted = trace.experts[rows].astype(int).reshape(-1, shape.num_layers, shape.top_k)
    embeddings = embeddings[is_decoded]
    probabilities = probabilities[is_decoded]
    distance = maps.distance
    best, semantic = best_matches(maps.semantic_scores(embeddings))
    said = maps.rows(best)[:, :distance]
    hits = {"semantic": _named(said, wanted[:, :distance])}
    scores = {"semantic": semantic}
    found = []
    named = []
    under_way = maps.begin(len(probabilities))
    for layer in range(shape.num_layers - distance):
        under_way.update(np.ascontiguousarray(probabilities[:, layer]))
        best, score = best_matches(under_way.scores())
        target = layer + distance
        found.append(score)
        named.append(_named(maps.layer(best, target)[:, None], wanted[:, target : target + 1]))
    scores["trajectory"] = np.mean(found, axis=0)
    hits["trajectory"] = np.mean(named, axis=0)
    requests = np.unique(folds.trace.request)
    return Found(np.searchsorted(requests, trace.request[first][is_decoded]), scores, hits)


def _named(said: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return [I] the share of `wanted` [I, l, k] among the k most probable of `said` [I, l, E]."""
    top = np.argsort(-said, axis=-1, kind="stable")[..., : wanted.shape[-1]]
    return (top[..., None] == wanted[..., None, :]).any(axis=-2).mean(axis=(1, 2))


def correlation(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return Pearson's correlation [B] of x and y [I], weighted by `weights` [B, I]."""
    total = weights.sum(axis=1)

    def mean(values: np.ndarray) -> np.ndarray:
        return weights @ values / total

    covariance = mean(x * y) - mean(x) * mean(y)
    spread = (mean(x * x) - mean(x) ** 2) * (mean(y * y) - mean(y) ** 2)
    return covariance / np.sqrt(spread)


def aggregated(folds: Folds) -> dict[int, float]:
    """Return the mean entropy over ln E of the mean of a request's first decoded iterations, by
    their number."""
    trace = folds.trace
    _, probabilities = from_trace.iterations(trace, folds.model.shape)
    first = np.unique(trace.iteration, return_index=True)[1]
    is_decoded = trace.phase[first] == DECODE
    request = trace.request[first]
    of_requests = [probabilities[(request == one) & is_decoded] for one in np.unique(request)]
    return {
        count: float(np.mean([_entropy(one[:count].mean(axis=0)) for one in of_requests]))
        for count in LENGTHS
    }


def _entropy(p: np.ndarray) -> float:
    return float(-(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1).mean() / np.log(p.shape[-1]))


def sheets(found: Searches) -> dict[str, Sheet]:
    """Return the tables of Figures 4, 8 and 14a."""
    fine = found.replays.hits_at
    weights = found.replays.folds.weights[:1]
    rows = [
        (ahead, UNKNOWN, float(fine[ahead].hit_rate(weights)[0]), float(rates[0]))
        + (_first(found.speculated.get(ahead)),)
        for ahead, rates in found.coarse.items()
    ]
    scores = []
    for capacity, one in found.by_capacity.items():
        for kind in _KINDS:
            score, hits = one.scores[kind], one.hits[kind]
            close = correlation(score, hits, one.weights(found.replays.folds)[:1])
            means = float(score.mean()), float(hits.mean())
            scores.append((capacity, kind, UNKNOWN, *means, float(close[0])))
    columns = ("maps", "search", "paper", "score", "experts named", "correlation")
    return {
        "coarse": Sheet(
            "Figure 4, section 2.4: hit rates by prefetch distance",
            ("d", "paper", "fine: maps", "coarse: hit count", "speculate"),
            rows,
        ),
        "searches": Sheet(
            "Figures 8 and 14a: scores of the best maps, and their experts", columns, scores
        ),
    }


def _first(rates: np.ndarray | None) -> float | None:
    return None if rates is None else float(rates[0])


def claims(found: Searches) -> Iterator[Claim]:
    """Yield the statements on these figures."""
    entropies = aggregated(found.replays.folds)
    values = list(entropies.values())
    yield derived(
        "Figure 3c: entropy rises as iterations are aggregated (of any routing)",
        "yes",
        ", ".join(f"{value:.3f} of {count}" for count, value in entropies.items()),
        values == sorted(values),
    )
    yield from _of_distances(found)
    yield from _of_scores(found)
    yield left_out(
        "Figure 14a: little more than 1,000 maps gain",
        "yes",
        f"more text: others leave {max(found.replays.folds.num_iterations):,} maps here",
        NOT_TESTABLE,
    )


def _of_distances(found: Searches) -> Iterator[Claim]:
    weights = found.replays.folds.weights
    fine = {ahead: one.hit_rate(weights) for ahead, one in found.replays.hits_at.items()}
    random = found.replays.patterns["random experts"].hit_rate(weights)
    yield by_request(
        f"Figure 4: fine hits more than coarse at every distance, by at least {_MORE:.0%}",
        "significantly",
        np.min([fine[ahead] / rates - 1 for ahead, rates in found.coarse.items()], axis=0),
        off="random experts for maps",
        null=np.min([random / rates - 1 for rates in found.coarse.values()], axis=0),
        test=above(_MORE),
    )
    first, last = (found.speculated[ahead] for ahead in (1, max(found.speculated)))
    yield by_request(
        f"Figure 12a: speculate falls drastically with the distance, by at least {_MORE:.0%}",
        "yes",
        1 - last / first,
        off="maps in its place",
        null=1 - fine[max(found.speculated)] / fine[1],
        test=above(_MORE),
    )


def _of_scores(found: Searches) -> Iterator[Claim]:
    folds = found.replays.folds
    most = found.by_capacity[CAPACITIES[-1]]
    least = found.by_capacity[CAPACITIES[0]]
    weights = most.weights(folds)
    shuffled = np.random.default_rng(0).permutation(len(most.request))
    for kind in _KINDS:
        score = most.scores[kind]
        yield by_request(
            f"Figure 8: the {kind} score goes with the hits, Pearson's r above {_CLOSE:g}",
            "high with high",
            correlation(score, most.hits[kind], weights),
            off="scores shuffled",
            null=correlation(score[shuffled], most.hits[kind], weights),
            test=above(_CLOSE),
            form=number("+.2f"),
        )
    count = weights.sum(axis=1)
    for kind in _KINDS:
        rises = (weights @ most.scores[kind] - weights @ least.scores[kind]) / count
        yield by_request(
            f"Figure 14a: the mean {kind} score rises from {CAPACITIES[0]} maps to 1,000",
            "yes",
            rises,
            off="a store that stays at its first maps",
            null=0.0,
            form=number("+.4f"),
        )
