"""The replays that the reproduction of fMoE rests on."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from artifacts.errors import BadInput
from artifacts.modelshapes.known import MODELS, ModelShape, unsized
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import Trace
from runtime.replay import from_trace
from tools.reproductions.fmoe import figures as paper
from tools.reproductions.fmoe.figures import HIT_RATE, RIVALS, TTFT, PaperGain
from tools.reproductions.fmoe.folds import ByRequest, FoldConditions, Folds

OURS = "fmoe"
OFF = "no prefetching"
SYSTEMS = (OURS, *RIVALS.values())
LEARNED = RIVALS["ProMoE"]  # needs a trace with what fitted predictors say
CONTROLS = {"random experts": "random", "most frequent": "popular"}
MAP = f"map:distance={paper.DISTANCE}"
PATTERNS = {
    "speculate": "next_gate",
    "hit count": f"frequency:distance={paper.DISTANCE}",
    "map T": f"{MAP},semantic=no,threshold=no",
    "map T+S": f"{MAP},threshold=no",
    "map T+S+delta": MAP,
}
PUBLISHED = f"{MAP},over=all"  # evicts by 1 / (p * freq), as section 4.5 has it
EVICTIONS = ("lru", "lfu", PUBLISHED, MAP)
HITS = FoldConditions()
BY_LAYER = FoldConditions(scope="layer")
TIMED = "qwen1.5-moe-a2.7b"  # whose costs Figures 10 and 13 are computed with

# Ours by resampling [B], and with no prefetching in fMoE's place; None without our figure.
Gains = list[tuple[PaperGain, tuple[np.ndarray, np.ndarray] | None]]
Runs = dict[str, ByRequest]


@dataclass(frozen=True, slots=True)
class FmoeReplays:
    """Results of all replays, by system or by the value that a figure varies.

    `systems` has a result with one cache and a result with a cache per layer. Results by prefetch
    distance are `distances`, with the link of the times, and `hits_at`, with the link of the hit
    rates.
    """

    folds: Folds
    systems: dict[str, list[ByRequest]]
    overall: Gains
    small: Gains
    patterns: Runs
    evictions: Runs
    distances: dict[int, ByRequest]
    hits_at: dict[int, ByRequest]
    online: Runs
    entropies: dict[str, float]


def replay_all(path: Path | None) -> FmoeReplays:
    """Replay the trace at `path`, by default one of the bundled model.

    Raises BadInput for a trace without embeddings, probabilities or predictions, or with one
    request only.
    """
    folds = Folds(*(_bundled() if path is None else _from_file(path)))
    systems = {
        name: [folds.run(name, conditions=one) for one in (HITS, BY_LAYER)]
        for name in systems_of(folds)
    }
    in_one_cache = {name: found[0] for name, found in systems.items()}
    in_one_cache[OFF] = unprefetched(folds, HITS)
    return FmoeReplays(
        folds=folds,
        systems=systems,
        overall=_gains(folds, paper.OVERALL, in_one_cache, _quarters()),
        small=_gains(folds, paper.SMALL_CACHE, in_one_cache, _small_caches()),
        patterns=_patterns(folds),
        evictions=_evictions(folds),
        distances=_distances(folds, FoldConditions(costs_of=TIMED)),
        hits_at=_distances(folds, HITS),
        online=_online(folds),
        entropies=_entropies(folds),
    )


def systems_of(folds: Folds) -> tuple[str, ...]:
    """Return the systems that the trace has what they need of."""
    has_learned = folds.trace.learned is not None
    return tuple(name for name in SYSTEMS if has_learned or name != LEARNED)


def _from_file(path: Path) -> tuple[Trace, ModelShape, str]:
    trace = read_parquet(path)
    if trace.probabilities is None or trace.iteration is None or trace.predicted is None:
        raise BadInput(
            f"{path} lacks probabilities, predictions or embeddings: record it with "
            f"`moectl run --prefetch next_gate:distance={paper.DISTANCE} --trace FILE`"
        )
    return trace, unsized(trace.num_layers, trace.probabilities.shape[1], trace.top_k), str(path)


def _bundled() -> tuple[Trace, ModelShape, str]:
    """Requests of held-out text, teacher-forced through the bundled model."""
    from tools.reproductions.requests import bundled_requests

    return bundled_requests(distance=paper.DISTANCE)


def _quarters() -> list[FoldConditions]:
    return [FoldConditions(costs_of=name) for name in paper.MODELS]


def _small_caches() -> list[FoldConditions]:
    """The cache of Figure 11 as a share of each model's experts."""
    shares = {name: paper.SMALL_CACHE_GB * 1e9 / MODELS[name].shape.nbytes for name in paper.MODELS}
    return [FoldConditions(budget=f"{share:.4%}", costs_of=name) for name, share in shares.items()]


def _gains(
    folds: Folds, rows: tuple[PaperGain, ...], by_hits: Runs, timed: list[FoldConditions]
) -> Gains:
    """Our gain beside each of the paper's: of hit rates, and of times as the mean over the models
    that are timed."""
    systems = systems_of(folds)
    runs = {name: [folds.run(name, conditions=one) for one in timed] for name in systems}
    runs[OFF] = [unprefetched(folds, one) for one in timed]
    weights = folds.weights

    def gain(row: PaperGain, own: str) -> np.ndarray:
        rival = RIVALS[row.against]
        if row.quantity == HIT_RATE:
            return by_hits[own].hit_rate(weights) / by_hits[rival].hit_rate(weights) - 1
        seconds = ByRequest.ttft_s if row.quantity == TTFT else ByRequest.tpot_s
        pairs = zip(runs[own], runs[rival], strict=True)
        return np.mean(
            [1 - seconds(one, weights) / seconds(other, weights) for one, other in pairs], 0
        )

    return [
        (row, (gain(row, OURS), gain(row, OFF)) if RIVALS[row.against] in systems else None)
        for row in rows
    ]


def unprefetched(
    folds: Folds, conditions: FoldConditions, *, from_empty: bool = False
) -> ByRequest:
    """Replay fMoE's cache without its prefetching, evicting by lfu: maps guide nothing."""
    return folds.run(conditions=conditions, from_empty=from_empty, eviction="lfu")


def _patterns(folds: Folds) -> Runs:
    ahead = min(paper.DISTANCE, folds.trace.predicted.shape[1])
    ways = PATTERNS | {"speculate": f"next_gate:distance={ahead}"} | CONTROLS
    return {
        label: folds.run(conditions=HITS, prefetch=way, eviction="lfu")
        for label, way in ways.items()
    }


def _evictions(folds: Folds) -> Runs:
    return {way: folds.run(conditions=HITS, prefetch=MAP, eviction=way) for way in EVICTIONS}


def _distances(folds: Folds, conditions: FoldConditions) -> dict[int, ByRequest]:
    most = min(6, folds.model.shape.num_layers - 1)
    ways = {ahead: f"map:distance={ahead}" for ahead in range(1, most + 1)}
    return {
        ahead: folds.run(conditions=conditions, prefetch=way, eviction=way)
        for ahead, way in ways.items()
    }


def _online(folds: Folds) -> Runs:
    timed = FoldConditions(costs_of=TIMED)
    found = {name: folds.run(name, conditions=timed, from_empty=True) for name in systems_of(folds)}
    return found | {OFF: unprefetched(folds, timed, from_empty=True)}


def _entropies(folds: Folds) -> dict[str, float]:
    """Mean entropies over ln E of all requests together, of a request, and of an iteration."""
    trace = folds.trace
    _, probabilities = from_trace.iterations(trace, folds.model.shape)
    request = trace.request[np.unique(trace.iteration, return_index=True)[1]]
    by_request = np.stack(
        [probabilities[request == one].mean(axis=0) for one in np.unique(request)]
    )
    parts = {
        "all requests together": probabilities.mean(axis=0)[None],
        "a request (coarse)": by_request,
        "an iteration (fine)": probabilities,
    }
    return {label: float(_entropy(part).mean()) for label, part in parts.items()}


def _entropy(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1) / np.log(p.shape[-1])
