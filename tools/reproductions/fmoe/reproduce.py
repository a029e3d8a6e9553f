"""fMoE, Figures 3, 9 to 13 and 16: what stored expert maps gain, on requests that are not among the
maps."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from artifacts.modelshapes.known import MODELS
from artifacts.routing.expert_maps import map_nbytes
from moectl.show.render import Sheet
from tools.reproductions.fmoe import figures as paper
from tools.reproductions.fmoe import rivals, search
from tools.reproductions.fmoe.figures import HIT_RATE, RIVALS, TPOT, TTFT
from tools.reproductions.fmoe.folds import BUDGET, ByRequest, Folds
from tools.reproductions.fmoe.replays import (
    BY_LAYER,
    HITS,
    MAP,
    OFF,
    OURS,
    PATTERNS,
    PUBLISHED,
    TIMED,
    FmoeReplays,
    Gains,
    Runs,
    replay_all,
)
from tools.reproductions.intervals import Interval
from tools.reproductions.judged import by_request, derived, left_out, within_times
from tools.reproductions.recorded import Recorded
from tools.reproductions.report import NOT_TESTABLE, UNKNOWN, Claim, Reproduction

_TOLERANCE = 2
_BETTER = {HIT_RATE: "more hits than", TTFT: "lower TTFT than", TPOT: "lower TPOT than"}
_ENTROPIES = "Figure 3b, section 2.4: entropies over ln E"


def reproduce(trace: Path | None = None) -> Reproduction:
    """Replay each quarter of this trace's requests with maps of the others, by default requests to
    the bundled model.

    Raises BadInput for a trace without embeddings, probabilities or predictions, or with one
    request only.
    """
    found = replay_all(trace)
    searches = search.Searches(found)
    best = rivals.found(found)
    recorded = Recorded.read()
    return Reproduction(
        name="fmoe",
        paper="fMoE (Yu et al., 2025, arXiv:2502.05370), Figures 3, 9 to 13 and 16",
        sheets=_sheets(found) | search.sheets(searches) | {"rivals": rivals.sheet(found, best)},
        claims=(
            *_gain_claims(found.overall, "Figure 9", HIT_RATE, TTFT, TPOT),
            *_gain_claims(found.small, "Figure 11", TPOT),
            *_ablation_claims(found),
            _recorded_claim(recorded),
            *_latency_claims(found),
            *_other_claims(found.entropies),
            *search.claims(searches),
            *rivals.claims(found, best),
        ),
        assumed=(*_assumed(found.folds), f"{recorded.told}; {BUDGET} of each layer"),
    )


def _sheets(found: FmoeReplays) -> dict[str, Sheet]:
    folds = found.folds
    least = f"with {paper.SMALL_CACHE_GB} GB of experts"
    by_pattern = "Figure 12a, section 6.5: what is prefetched by (lfu evicts)"
    by_eviction = f"Figure 12b, section 6.5: what is evicted by ({MAP} prefetches)"
    entropies = [(label, UNKNOWN, value) for label, value in found.entropies.items()]
    return {
        "systems": _system_sheet(folds, found.systems),
        "gains": _gain_sheet(
            "Figure 9, section 6.2: fMoE against others, mean of three models", found.overall
        ),
        "small": _gain_sheet(f"Figure 11, section 6.4: {least}, mean of three models", found.small),
        "patterns": _hit_sheet(folds, by_pattern, found.patterns),
        "evictions": _hit_sheet(folds, by_eviction, found.evictions),
        "distances": _distance_sheet(found),
        "online": _online_sheet(folds, found.online),
        "entropy": Sheet(_ENTROPIES, ("of", "paper", "entropy"), entropies),
    }


# Tables


def _rate(found: ByRequest, folds: Folds) -> float:
    return float(found.hit_rate(folds.weights[:1])[0])


def _system_sheet(folds: Folds, systems: dict[str, list[ByRequest]]) -> Sheet:
    more = {
        "fmoe, not learning": [
            folds.run(OURS, conditions=one, learns=False) for one in (HITS, BY_LAYER)
        ],
        "oracle": [
            folds.run(conditions=one, eviction="belady", prefetch="oracle")
            for one in (HITS, BY_LAYER)
        ],
    }
    rows = [
        (name, UNKNOWN, *(_rate(one, folds) for one in found))
        for name, found in (systems | more).items()
    ]
    return Sheet(
        f"Hit rates at {BUDGET}", ("policies", "paper", "one cache", "a cache a layer"), rows
    )


def _gain_sheet(title: str, gains: Gains) -> Sheet:
    rows = [
        (gain.against, gain.quantity, gain.share)
        + ((None, None) if found is None else (float(found[0][0]), str(Interval.of(found[0]))))
        for gain, found in gains
    ]
    return Sheet(title, ("against", "fMoE has", "paper", "ours", "interval"), rows)


def _hit_sheet(folds: Folds, title: str, runs: Runs) -> Sheet:
    rows = [(label, UNKNOWN, _rate(found, folds)) for label, found in runs.items()]
    return Sheet(title, ("by", "paper", "hit rate"), rows)


def _distance_sheet(found: FmoeReplays) -> Sheet:
    folds = found.folds
    rows = []
    once = folds.weights[:1]
    for ahead, timed in found.distances.items():
        ms = [float(seconds[0]) * 1e3 for seconds in (timed.ttft_s(once), timed.tpot_s(once))]
        rows.append((ahead, UNKNOWN, _rate(found.hits_at[ahead], folds), _rate(timed, folds), *ms))
    columns = ("d", "paper", "hit rate", f"by the link of {TIMED}", "TTFT, ms", "TPOT, ms")
    return Sheet(
        f"Figure 13, section 6.6: prefetch distance, virtual time of {TIMED}", columns, rows
    )


def _online_sheet(folds: Folds, runs: Runs) -> Sheet:
    rows = [
        (name, UNKNOWN, _rate(found, folds), float(found.latency_s(folds.weights[:1])[0]) * 1e3)
        for name, found in runs.items()
    ]
    columns = ("system", "paper", "hit rate", "latency of a request, ms")
    return Sheet(
        f"Figure 10, section 6.3: from an empty store, virtual time of {TIMED}", columns, rows
    )


# Claims


def _sign(text: str, ours: np.ndarray, off: str, null: np.ndarray | float) -> Claim:
    """A gain of which the paper prints no size."""
    return by_request(text, "yes", ours, off=off, null=null)


def _gain_claims(gains: Gains, figure: str, *quantities: str) -> Iterator[Claim]:
    """One claim a gain, with its size."""
    for gain, found in sorted(gains, key=lambda pair: quantities.index(pair[0].quantity)):
        said = f"by {gain.share:.0%}".replace("%", " %")
        if found is not None:
            ours, null = found
            yield by_request(
                f"{figure}: {_BETTER[gain.quantity]} {gain.against}",
                said,
                ours,
                off=OFF,
                null=null,
                test=within_times(gain.share, _TOLERANCE),
            )
        elif gain.quantity == quantities[0]:
            yield left_out(
                f"{figure}: better than {gain.against}",
                said,
                "the trace lacks what predictors fitted to the model say: the bundled one has it",
                NOT_TESTABLE,
            )


def _ablation_claims(found: FmoeReplays) -> Iterator[Claim]:
    weights = found.folds.weights
    rates = {
        label: one.hit_rate(weights) for label, one in (found.patterns | found.evictions).items()
    }
    others = np.min([rates[label] for label in PATTERNS if label != "hit count"], axis=0)
    random = rates["random experts"]
    yield _sign(
        "Figure 12a: all others hit more often than hit count",
        others / rates["hit count"] - 1,
        "random experts in their place",
        random / rates["hit count"] - 1,
    )
    for text, first, then in (
        ("Figure 12a: T+S hits more often than T", "map T", "map T+S"),
        ("Figure 12a: T+S+delta hits more often than T+S", "map T+S", "map T+S+delta"),
        ("Figure 12b: lfu hits more often than lru", "lru", "lfu"),
        (
            f"Figure 12b: {PUBLISHED} (1 / (p freq), 4.5) hits more often than lfu",
            "lfu",
            PUBLISHED,
        ),
    ):
        yield _sign(text, rates[then] / rates[first] - 1, f"{first} in both", 0.0)


def _recorded_claim(recorded: Recorded) -> Claim:
    held = recorded.shape.num_experts // 4
    lru, lfu = (recorded.hits(one, held)[0] for one in ("lru", "lfu"))
    text = f"{recorded.name}: lfu hits more often than lru (Figure 12b)"
    return _sign(text, lfu / lru - 1, "lru in both", 0.0)


def _latency_claims(found: FmoeReplays) -> Iterator[Claim]:
    weights = found.folds.weights
    distances = found.distances
    rates = {name: one[0].hit_rate(weights) for name, one in found.systems.items()}
    best = RIVALS[paper.BEST_RIVAL]
    second = np.max([rates[name] for name in rates if name not in (OURS, best)], axis=0)
    yield _sign(
        f"section 6.2: of the others {paper.BEST_RIVAL} hits most",
        rates[best] / second - 1,
        "loading on demand in its place",
        rates["on-demand"] / second - 1,
    )
    whole = {name: one.latency_s(weights) for name, one in found.online.items()}
    least = np.min([whole[name] for name in whole if name not in (OURS, OFF)], axis=0)
    yield _sign(
        "Figure 10: less latency than every other, from empty",
        1 - whole[OURS] / least,
        OFF,
        1 - whole[OFF] / least,
    )
    tpot = {ahead: one.tpot_s(weights) for ahead, one in distances.items()}
    others = np.min([seconds for ahead, seconds in tpot.items() if ahead != paper.DISTANCE], axis=0)
    yield _sign(
        f"Figure 13: TPOT at d = {paper.DISTANCE} below that at any other d",
        1 - tpot[paper.DISTANCE] / others,
        "d = 1 in its place",
        1 - tpot[1] / others,
    )
    first, last = (
        found.hits_at[ahead].hit_rate(weights) for ahead in (min(distances), max(distances))
    )
    yield _sign(
        "section 6.6: the hit rate falls with the distance",
        1 - last / first,
        "one distance in both",
        0.0,
    )


def _other_claims(entropies: dict[str, float]) -> list[Claim]:
    _, coarse, fine = entropies.values()
    shapes = [(MODELS[name].shape, MODELS[name].hidden) for name in paper.MODELS]
    sizes = [
        [
            map_nbytes(shape.num_layers, shape.num_experts, width * wide) * paper.MOST_MAPS / 1e6
            for shape, wide in shapes
        ]
        for width in (0, 1)
    ]
    without, whole = (f"{min(each):.0f} to {max(each):.0f}" for each in sizes)
    return [
        derived(
            "Figure 3b: an iteration is less undecided than a request",
            "yes",
            f"{fine:.3f} to {coarse:.3f}, as of any mean of distributions",
            fine < coarse,
        ),
        derived(
            f"Figure 16: {paper.MOST_MAPS:,} maps in less than {paper.MOST_MAPS_MB} MB",
            "yes",
            f"{without} MB to store the maps, as the text says; {whole} MB with the embeddings "
            "that the search needs",
            max(sizes[0]) < paper.MOST_MAPS_MB,
        ),
        left_out(
            "Figure 15: less than 30 ms an iteration beside compute",
            "yes",
            "a GPU and the models",
            NOT_TESTABLE,
        ),
    ]


def _assumed(folds: Folds) -> tuple[str, ...]:
    fewest = min(folds.num_maps)
    most = max(folds.num_maps)
    return (
        f"{folds.source}: each quarter of its {folds.num_requests} requests is replayed, prompts "
        f"included, from an empty cache, with {fewest:,} to {most:,} maps of the others; "
        "iterations join the maps when they are over",
        (
            "intervals: 95 % of 1,000 resamplings of the requests; a gain agrees within a factor "
            "of 2, and one without a printed size where zero is outside"
        ),
        f"hit rates: {BUDGET} of the experts in one cache, and a link that moves as many experts "
        "a layer as a token selects; the systems as their presets have them, in that cache",
        f"times: virtual, of one {paper.MACHINE}, of which the paper has six; the trace's routing "
        f"over the costs of an expert, a layer and the link of {', '.join(paper.MODELS)}; nothing "
        f"is charged for the search; Figure 9 at {BUDGET}, as its cache is not stated, Figure 11 "
        "at that share of each model's experts",
        "Mixtral-Offloading and MoE-Infinity prefetch beside compute here; in the paper they "
        "wait, which it names as the reason of their latency",
        "the headline, 36 % more hits and 47 % less latency, is the mean of Figure 9: of 11, 34 "
        "and 63 %, without DeepSpeed-Inference, and of all eight latencies; over the best other "
        "system it is 11 %",
        (
            "the paper's d is the policy's distance; Figures 12a and 12b have d = "
            f"{paper.DISTANCE}, the preset 1"
        ),
        f"Figure 12b is judged by the eviction of section 4.5, {PUBLISHED}; all other rows, the "
        "presets' too, evict by map without over=all, which weighs only the layers ahead",
    )
