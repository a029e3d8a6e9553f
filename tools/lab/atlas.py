"""An atlas of locality: how each recorded trace, and synthetic ones by regime, reuses its experts.

    python -m tools.lab.atlas
    python -m tools.lab.atlas --traces FOLDER --write docs/lab/atlas.md --pictures docs/pictures/atlas
    python -m tools.lab.atlas --trace mine.parquet --num-experts 128

Hit rates by budget, loading on demand from a cold cache of global scope; passes from one use of an
expert to the next; how uneven layers are; how well a static hot set, the most used quarter of each
layer, serves other requests than those that it was learnt on. Intervals (95 %) resample requests.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from artifacts.shape import Shape
from artifacts.traces.next_use import NEVER, NextUse
from artifacts.traces.synthetic import generate, parse_dials
from moectl.charts.pictures import write_picture
from moectl.charts.plots import Line, lines
from moectl.charts.scales import Drawing, Frame, linear_scale
from moectl.report.gallery import WIDTH
from runtime.policies.presets import Scope
from tools.bench.performance import Section, Table, publish
from tools.bench.traces.real import Cell, Prepared, half, options, present
from tools.lab.gap import interval
from tools.lab.trace_statistics import measure
from tools.reproductions.intervals import resampled

EVICTIONS = {
    "lru": "strong",
    "class_lru": "quiet",
    "lfu": "fresh",
    "horizon": "warm",
    "belady": "ink",
}
SHARES = (0.0625, 0.125, 0.25, 0.375, 0.5, 0.75)
HOT = 0.25
REGIMES = {
    "even": "skew=0,locality=0",
    "popular": "skew=1.2,locality=0",
    "local": "skew=0,locality=0.7",
    "popular-and-local": "skew=0.8,locality=0.4",
}
_SHAPE = Shape(num_layers=8, num_experts=32, top_k=4, expert_nbytes=1)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A trace of the atlas. `counts` [R, L, E]: how often each request's tokens used each expert."""

    name: str
    prepared: Prepared
    counts: np.ndarray

    @classmethod
    def of(cls, name: str, prepared: Prepared) -> "Place":
        trace = prepared.trace
        _, request = np.unique(trace.request, return_inverse=True)
        size = int(request.max()) + 1, trace.num_layers, prepared.shape.num_experts
        counts = np.zeros(size, np.int64)
        np.add.at(counts, (request[:, None], trace.layer[:, None], trace.experts), 1)
        return cls(name, prepared, counts)

    @property
    def num_tokens(self) -> int:
        return int((self.prepared.trace.layer == 0).sum())


def places(chosen: argparse.Namespace) -> Iterator[Place]:
    """Yield the recorded traces that are there, and the synthetic ones unless some were named."""
    for real, path in present(chosen):
        yield Place.of(real.name, Prepared.of_file(real, path, chosen.tokens))
    if not (chosen.trace or chosen.only):
        for name, dials in REGIMES.items():
            text = f"{dials},tokens={chosen.tokens},prompt=0,requests=8"
            trace = generate(parse_dials(text), _SHAPE, detailed=False)
            yield Place.of(f"synthetic: {name}", Prepared(trace, _SHAPE.num_experts))


def hits(place: Place) -> dict[str, list[Cell]]:
    """Replay every policy at every budget of SHARES."""
    return {
        name: [
            Cell.of(place.prepared.replayed({"eviction": name}, Scope.GLOBAL, share))
            for share in SHARES
        ]
        for name in EVICTIONS
    }


def rates_table(place: Place, found: dict[str, list[Cell]]) -> Table:
    """Hit rates by budget, and loads a token."""
    prepared = place.prepared
    once = np.ones((1, prepared.weights.shape[1]))
    rows = []
    for name, cells in found.items():
        told = [
            f"{cell.rates(prepared.units, once)[0]:.3f} ± "
            f"{half(cell.rates(prepared.units, prepared.weights)):.3f}"
            for cell in cells
        ]
        quarter = cells[SHARES.index(HOT)]
        loads = (quarter.requests.sum() - quarter.hits.sum()) / place.num_tokens
        rows.append((f"`{name}`", *told, f"{loads:.1f}"))
    columns = ("eviction", *(f"{100 * share:g} %" for share in SHARES), "loads a token at 25 %")
    shape = prepared.shape
    note = (
        f"{place.num_tokens:,} tokens, {len(place.counts)} requests, {shape.num_layers} layers, "
        f"{shape.top_k} of {shape.num_experts} experts; intervals by {prepared.unit}"
    )
    return Table(place.name, columns, rows, note)


def picture(place: Place, found: dict[str, list[Cell]]) -> Drawing:
    """The hit rates by budget as lines."""
    frame = Frame(width=WIDTH, right=110)
    x = linear_scale(
        0.8, name="share of the experts in the cache", shown="{:.0%}".format, **frame.across
    )
    y = linear_scale(1.0, name="hit rate", **frame.upwards)
    drawn = [
        Line(
            [
                (share, float(cell.hits.sum() / cell.requests.sum()))
                for share, cell in zip(SHARES, found[name], strict=True)
            ],
            colour,
            name,
            has_dots=True,
        )
        for name, colour in EVICTIONS.items()
    ]
    title = f"{place.name}: how often a wanted expert is resident"
    return lines(title, drawn, x, y, frame, says=f"{title}: {', '.join(EVICTIONS)}")


def waits(place: Place) -> np.ndarray:
    """Return the passes from each use of an expert to its next one; infinite after the last."""
    prepared = place.prepared
    future = NextUse.of(prepared.trace, prepared.shape)
    steps = np.repeat(np.arange(len(future.following)), [len(one) for one in future.following])
    following = np.concatenate(future.following)
    ahead = (following - steps) / prepared.shape.num_layers
    return np.where(following == NEVER, np.inf, ahead)


def stack_distances(place: Place) -> np.ndarray:
    """Return how many other experts of the layer were used since each use's last one: a cache by
    layer of more slots hits under lru (Mattson et al., 1970). Infinite for a first use."""
    shape = place.prepared.shape
    last = np.full((shape.num_layers, shape.num_experts), -1)
    found = []
    for number, step in enumerate(place.prepared.trace.steps()):
        own = last[step.layer]
        used = np.unique(step.experts).astype(np.int64)
        since = (own[None, :] > own[used][:, None]).sum(axis=1)
        found.append(np.where(own[used] < 0, np.inf, since))
        own[used] = number * shape.num_experts + used  # of one step the lower goes first
    return np.concatenate(found)


def hot(counts: np.ndarray) -> np.ndarray:
    """Return the most used quarter of each layer [L, E] bool, by counts [L, E]; equals by id."""
    num_hot = round(HOT * counts.shape[1])
    order = np.argsort(-counts, axis=1, kind="stable")[:, :num_hot]
    is_hot = np.zeros(counts.shape, bool)
    np.put_along_axis(is_hot, order, True, axis=1)
    return is_hot


def served(is_hot: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the hit rate of a static set on requests [R, L, E], first as they are, then for every
    resampling of them."""
    weights = resampled(len(counts))
    return (weights @ counts[:, is_hot].sum(axis=1)) / (weights @ counts.sum(axis=(1, 2)))


def summary(found: Sequence[Place]) -> Table:
    """What kind of locality each trace has."""
    columns = (
        "trace",
        "k / E, and reuse by the next token",
        "r at 25 %: mean, above 1",
        "passes to the next use: median, 75, 90 %",
        "stack distance: median, 75, 90 %",
        "busiest quarter: mean of layers (least to most)",
        "static quarter, learnt on what it serves",
        "learnt on the other half",
        "hot sets in common",
    )
    note = (
        "`inf`: never again. r: distinct experts of a step over the slots of its layer. The static "
        "quarter is the most used experts of each layer, on the second half of the requests; any "
        "set serves 0.25, and any two have 0.25 in common"
    )
    return Table("Kinds of locality", columns, [kind_of(place) for place in found], note)


def kind_of(place: Place) -> tuple[str, ...]:
    """A row of the summary; a trace of one request has no other half."""
    shape, counts = place.prepared.shape, place.counts
    used = counts.sum(axis=0)
    busiest = (used * hot(used)).sum(axis=1) / used.sum(axis=1)
    union = np.array([len(np.unique(step.experts)) for step in place.prepared.trace.steps()])
    ratio = union / (HOT * shape.num_experts)
    static = ("–", "–", "–")
    if halfway := len(counts) // 2:
        first, second = (hot(part.sum(axis=0)) for part in (counts[:halfway], counts[halfway:]))
        other = served(first, counts[halfway:])
        static = (
            f"{served(second, counts[halfway:])[0]:.3f}",
            f"{other[0]:.3f} ± {half(other[1:]):.3f}",
            f"{(first & second).sum() / first.sum():.2f}",
        )
    reuse = measure(place.prepared.trace, shape.num_experts).reuse
    return (
        place.name,
        f"{shape.top_k / shape.num_experts:.3f}, {reuse:.3f}",
        f"{ratio.mean():.2f}, {(ratio > 1).mean():.0%}",
        *(
            ", ".join(
                f"{value:.0f}" for value in np.percentile(values, [50, 75, 90], method="lower")
            )
            for values in (waits(place), stack_distances(place))
        ),
        f"{busiest.mean():.2f} ({busiest.min():.2f} to {busiest.max():.2f})",
        *static,
    )


def transfer(found: Sequence[Place]) -> Table | None:
    """How a static hot set of one text serves another, for traces of one model; None if there is
    only one."""
    texts = [place for place in found if place.name.startswith("gpt-oss-20b-")]
    if len(texts) < 2:
        return None
    rows = [
        (
            learnt.name,
            *(interval(served(hot(learnt.counts.sum(axis=0)), on.counts)) for on in texts),
        )
        for learnt in texts
    ]
    note = "Hit rates; on the diagonal the set has seen the text that it serves"
    columns = ("static quarter learnt on", *(place.name for place in texts))
    return Table("A hot set on other texts", columns, rows, note)


def main() -> None:
    parser = options(
        __doc__,
        trace=(Path, "one trace in Parquet instead"),
        num_experts=(32, "of each layer of that trace"),
        curves=(1000, "tokens at most of the hit rates by budget"),
        pictures=(Path, "write a picture of each trace into this folder"),
    )
    chosen = parser.parse_args()
    found = list(places(chosen))
    tables = [summary(found)]
    if other := transfer(found):
        tables.append(other)
    chosen.tokens = min(chosen.tokens, chosen.curves)
    for place in places(chosen):
        cells = hits(place)
        tables.append(rates_table(place, cells))
        if chosen.pictures:
            chosen.pictures.mkdir(parents=True, exist_ok=True)
            stem = place.name.replace(": ", "-")
            write_picture(picture(place, cells), chosen.pictures / f"{stem}.svg")
    command = f"python -m tools.lab.atlas --traces FOLDER --curves {chosen.curves}"
    publish(Section("atlas", tables), chosen.write, command)


if __name__ == "__main__":
    main()
