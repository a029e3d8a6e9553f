"""fMoE's rivals at their best published setting, found on other text: the setting of the paper
beside it, and the next router's experts under fMoE's own kind of eviction."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from moectl.show.render import Sheet
from tools.reproductions.fmoe import figures as paper
from tools.reproductions.fmoe.figures import HIT_RATE, RIVALS
from tools.reproductions.fmoe.folds import Folds
from tools.reproductions.fmoe.replays import HITS, OFF, OURS, FmoeReplays, unprefetched
from tools.reproductions.intervals import Interval
from tools.reproductions.judged import by_request, within_times
from tools.reproductions.report import Claim

REQUESTS = 16  # of the text that settings are found on
_EVICTIONS = ("lru", "lfu", "lcp", "class_lru")
# Every prefetching as published by some paper: the top k, and half as many or as many again.
_WIDTHS = ("", ":overfetch=1.5", ":overfetch=2")
GRIDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "DeepSpeed-Inference": (("none",), _EVICTIONS),
    "Mixtral-Offloading": (tuple(f"next_gate{width}" for width in _WIDTHS), _EVICTIONS),
    "ProMoE": (tuple(f"learned{width}" for width in _WIDTHS), _EVICTIONS),
    "MoE-Infinity": (
        ("activation", "activation:distance=1", "activation:distance=1,overfetch=1"),
        (*_EVICTIONS, "activation"),
    ),
}
CONTROL = "next router, lfu"


@dataclass(frozen=True, slots=True)
class Rival:
    """A rival's best prefetching and eviction, its hit rate [B] with them and, where it is a system
    of the paper's, with the paper's own setting."""

    name: str
    prefetch: str
    eviction: str
    hits: np.ndarray
    as_published: np.ndarray | None


def found(replays: FmoeReplays) -> list[Rival]:
    """Return every rival at the setting of its grid that hits most on other text; the control."""
    from tools.reproductions.requests import bundled_requests

    training = Folds(*bundled_requests(distance=paper.DISTANCE, data="builtin", count=REQUESTS))
    folds = replays.folds
    rivals = []
    for name, grid in GRIDS.items():
        if RIVALS[name] in replays.systems:
            prefetch, eviction = max(product(*grid), key=lambda ways: _hits(training, *ways)[0])
            own = replays.systems[RIVALS[name]][0].hit_rate(folds.weights)
            rivals.append(Rival(name, prefetch, eviction, _hits(folds, prefetch, eviction), own))
    return [*rivals, Rival(CONTROL, "next_gate", "lfu", _hits(folds, "next_gate", "lfu"), None)]


def _hits(folds: Folds, prefetch: str, eviction: str) -> np.ndarray:
    run = folds.run(conditions=HITS, prefetch=prefetch, eviction=eviction)
    return run.hit_rate(folds.weights)


def sheet(replays: FmoeReplays, rivals: list[Rival]) -> Sheet:
    """Return hit rates by rival, of both settings, and fMoE's gain over the best."""
    ours = replays.systems[OURS][0].hit_rate(replays.folds.weights)
    rows = [
        (one.name, None if one.as_published is None else float(one.as_published[0]))
        + (f"{one.prefetch}, {one.eviction}", float(one.hits[0]))
        + (str(Interval.of(ours / one.hits - 1)),)
        for one in rivals
    ]
    columns = ("rival", "the paper's setting", "best on other text", "hit rate", "fmoe over it")
    return Sheet(
        "Rivals at their best published setting",
        columns,
        rows,
        f"the setting of each grid that hits most on {REQUESTS} requests of the text that the "
        "bundled model was trained on: `moectl simulate --reproduce fmoe` finds it anew",
    )


def claims(replays: FmoeReplays, rivals: list[Rival]) -> Iterator[Claim]:
    """Yield Figure 9's hit rates over each rival at its best; any gain over the control."""
    weights = replays.folds.weights
    ours = replays.systems[OURS][0].hit_rate(weights)
    off = unprefetched(replays.folds, HITS).hit_rate(weights)
    printed = {row.against: row.share for row in paper.OVERALL if row.quantity == HIT_RATE}
    for one in rivals:
        said = printed.get(one.name)
        options = {} if said is None else {"test": within_times(said, 2)}
        yield by_request(
            f"Figure 9: more hits than {one.name}, at its best ({one.prefetch}, {one.eviction})",
            "yes" if said is None else f"by {said:.0%}",
            ours / one.hits - 1,
            off=OFF,
            null=off / one.hits - 1,
            **options,
        )
