"""Pictures of a store's knowledge of a model: measurements, replicas, and its newest trace: the
choices of routers, and the caches that hold the experts.

All values of a trace's pictures are counts: equal traces give equal pictures.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from artifacts.quantisation.widths import WIDTHS
from artifacts.shape import Shape
from artifacts.store.rows import quant_loss_matrices
from artifacts.store.store import Store
from artifacts.traces.next_use import NextUse
from artifacts.traces.parquet import from_table
from artifacts.traces.trace import DECODE, Trace
from moectl.charts.plots import Line, heatmap, lines
from moectl.charts.scales import Drawing, Frame, draw, linear_scale, log_scale
from moectl.report import queries
from moectl.report.figures import mark
from moectl.report.reading import ReportSource, of_experts
from moectl.show.demonstration import FULL, WIDTH, time_and_quality
from moectl.show.grounds import measured
from runtime.control.build import build_controller
from runtime.control.controller import Controller
from runtime.control.counters import hit_rate
from runtime.control.plan import Plan
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.presets import Scope, preset
from runtime.policies.step import Step
from runtime.replay.replay import replay

EVICTIONS = {"random": "quiet", "lru": "strong", "lfu": "fresh", "horizon": "warm", "belady": "ink"}
SHARES = (0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.75)
KEY = {"s2": "resident", "p0": "used, was resident: hit", "p1": "used, was loaded: miss"}
_TOKENS = 96
_MOMENTS = 24
_MOMENT_S = 0.6  # seconds that a token of the animation stays
_OF_TRACE = 1024  # tokens of a trace: more make the same pictures, later


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of the gallery by the name of its file; without a `drawing`, `why` names the data
    that it waits for."""

    name: str
    drawing: Drawing | None
    why: str = ""


def gallery(
    store: Store, *, job: str | None = None, model_id: str | None = None
) -> Iterator[Picture]:
    """Every picture that the store has the data for, and what the others wait for."""
    source = ReportSource(store, job=job, model_id=model_id)
    yield Picture("time-quality", _time_and_quality(source), "a live bench: moectl bench")
    yield Picture("bits", _bits(store, source), "replicas: moectl quantize")
    trace, shape = _trace(store, source)
    for picture in (hit_rates, residency, routing, skew):
        name = picture.__name__.replace("_", "-")
        drawn = picture(trace, shape) if trace else None
        yield Picture(name, drawn, "a trace: moectl profile --trace")


def _time_and_quality(source: ReportSource) -> Drawing | None:
    """Every preset of the newest live bench, at the budget and link with most of them."""
    job = next((job for job in source.jobs if job.mode == "live"), None)
    rows = source.rows(queries.filled(queries.TABLE, job=job.digest)) if job else []
    known = [
        row
        for row in rows
        if row["mode"] == "live" and None not in (row["times_full"], row["perplexity_ratio"])
    ]
    full, ours = (
        [row for row in known if (row["preset"] == FULL) == is_full] for is_full in (True, False)
    )
    if not ours:
        return None
    places = [(row["budget"], row["link"]) for row in ours]
    budget, link = max(dict.fromkeys(places), key=places.count)
    shown = [*full[:1], *(row for row in ours if (row["budget"], row["link"]) == (budget, link))]
    marks = [mark(row, is_absolute=False) for row in shown]
    listed = "; ".join(f"{one.name} {one.x:.1f}, {100 * one.y:.1f} %" for one in marks)
    grounds = measured(link).says
    return time_and_quality(
        marks, held=of_experts(budget), grounds=grounds, says=f": {listed}", height=400, most=1.12
    )


def _bits(store: Store, source: ReportSource) -> Drawing | None:
    """The mean error of each layer's experts by width of their replicas."""
    run = source.newest("quant_loss")
    shape = _shape(store, source.model_id)
    if run is None or shape is None:
        return None
    relative = quant_loss_matrices(
        store.read("quant_loss", run), shape.num_layers, shape.num_experts
    )["relative"]
    is_made = ~np.isnan(relative).all(axis=(0, 1))
    widths = [bits for bits, made in zip(WIDTHS, is_made, strict=True) if made]
    by_layer = np.nanmean(relative[:, :, is_made], axis=1)  # [L, W]
    frame = Frame(width=WIDTH, left=66, right=110)
    x = linear_scale(max(widths), name="bits a weight", **frame.across)
    y = log_scale(by_layer.ravel().tolist(), name="squared error, output = 1", **frame.upwards)
    drawn = [Line(list(zip(widths, losses.tolist(), strict=True)), "quiet") for losses in by_layer]
    mean = list(zip(widths, by_layer.mean(axis=0).tolist(), strict=True))
    drawn = [
        Line(drawn[0].points, "quiet", "each layer"),
        *drawn[1:],
        Line(mean, "strong", "mean", has_dots=True),
    ]
    title = "What experts lose in few bits (squared error of the output)"
    return lines(title, drawn, x, y, frame, says=title)


def _trace(store: Store, source: ReportSource) -> tuple[Trace | None, Shape | None]:
    """The beginning of the model's newest trace."""
    run = source.newest("traces")
    shape = _shape(store, source.model_id)
    if run is None or shape is None:
        return None, None
    trace = from_table(store.read("traces", run), num_experts=shape.num_experts)
    passes = trace.pass_indices()
    tokens = np.flatnonzero(trace.layer == trace.layer[0])
    return trace.take(np.flatnonzero(passes <= passes[tokens[:_OF_TRACE][-1]])), shape


def _shape(store: Store, model_id: str | None) -> Shape | None:
    return next((model.shape for model in store.models() if model.model_id == model_id), None)


# Pictures of a trace


def routing(trace: Trace, shape: Shape) -> Drawing:
    """The experts of one layer that each decoded token selected."""
    layer = trace.num_layers // 2
    selected = trace.experts[(trace.layer == layer) & (trace.phase == DECODE)][:_TOKENS]
    matrix = np.zeros((shape.num_experts, len(selected)))
    matrix[selected.T, np.arange(len(selected))] = 1
    title = f"Layer {layer}: the {selected.shape[1]} experts that each token takes"
    return heatmap(
        title, matrix.tolist(), top=1, row="expert", column="decoded token", says=title, width=WIDTH
    )


def skew(trace: Trace, shape: Shape) -> Drawing:
    """The share of all requests that the most used experts of each layer have."""
    frame = Frame(width=WIDTH)
    x = linear_scale(shape.num_experts, name="most used experts of a layer", **frame.across)
    y = linear_scale(1.0, name="share of requests", **frame.upwards)
    drawn = [Line([(0, 0), (shape.num_experts, 1)], "quiet", is_dashed=True)]
    for layer in range(trace.num_layers):
        counts = np.sort(
            np.bincount(trace.experts[trace.layer == layer].ravel(), minlength=shape.num_experts)
        )[::-1]
        drawn.append(
            Line(list(enumerate([0.0, *(np.cumsum(counts) / counts.sum()).tolist()])), "strong")
        )
    title = "A line for each layer; dashed: if all experts were used alike"
    return lines(title, drawn, x, y, frame, says=title)


def hit_rates(trace: Trace, shape: Shape) -> Drawing:
    """Hit rates of eviction policies by budget, from random choice to the oracle."""
    frame = Frame(width=WIDTH, right=100)
    x = linear_scale(
        0.8, name="share of the experts in the fast tier", shown="{:.0%}".format, **frame.across
    )
    y = linear_scale(1.0, name="hit rate", **frame.upwards)
    drawn = [
        Line(
            [(share, _hit_rate(trace, shape, name, share)) for share in SHARES],
            colour,
            name,
            has_dots=True,
        )
        for name, colour in EVICTIONS.items()
    ]
    title = "How often a wanted expert is resident, without prefetching"
    return lines(title, drawn, x, y, frame, says=f"{title}: {', '.join(EVICTIONS)}")


def residency(trace: Trace, shape: Shape) -> Drawing:
    """Draw which experts are resident while one token after another is decoded.

    The fast tier holds a quarter of the experts and evicts the least recently used. Programs that
    play no animation, and readers who want none, see the last token.
    """
    title = "Resident experts, token by token (a quarter of them, lru)"
    first, moments = _residents(trace, shape)
    cell = min(18.0, (WIDTH - 40) / shape.num_experts)
    high = max(cell, 8.0)
    own = {
        "moments": [
            [(kind, _cells(table)) for kind, table in zip(KEY, tables, strict=True) if table.any()]
            for tables in moments
        ],
        "first": first,
        "moment_s": _MOMENT_S,
        "wide": cell,
        "high": high,
        "num_layers": trace.num_layers,
        "num_experts": shape.num_experts,
        "key": KEY,
    }
    return draw("moments", title, title, WIDTH, trace.num_layers * high + 64, **own)


def _hit_rate(trace: Trace, shape: Shape, eviction: str, share: float) -> float:
    controller = _controller(trace, shape, eviction, share, Scope.GLOBAL)
    replay(trace, controller)
    return hit_rate(controller.counters.totals())


def _controller(
    trace: Trace, shape: Shape, eviction: str, share: float, scope: Scope
) -> Controller:
    policies = build(preset("on-demand").texts() | {"eviction": eviction})
    artefacts = (
        Artefacts(next_use=NextUse.of(trace, shape)) if eviction == "belady" else Artefacts()
    )
    slots = round(share * shape.num_keys)
    known = {"num_slots": slots, "shadows": None, "split": None, "scope": scope, "window": 0}
    return build_controller(policies, shape, artefacts=artefacts, **known)


def _residents(trace: Trace, shape: Shape) -> tuple[int, list[tuple[np.ndarray, ...]]]:
    """Return the first token shown, and of each token the experts that were resident but not used,
    hit, and loaded: each [L, E] bool."""
    controller = _controller(trace, shape, "lru", 0.25, Scope.LAYER)
    tables: dict[int, tuple[np.ndarray, ...]] = {}
    size = (shape.num_layers, shape.num_experts)
    before = np.zeros(size, bool)

    def watch(step: Step, plan: Plan) -> None:
        layer = step.layer
        used = np.zeros(shape.num_experts, bool)
        used[np.unique(step.selected)] = True
        now = controller.cache.layer_states(layer) > 0
        if step.phase == DECODE:
            held, hit, loaded = tables.setdefault(
                step.pass_index, tuple(np.zeros(size, bool) for _ in range(3))
            )
            held[layer] = now & ~used
            hit[layer] = used & before[layer]
            loaded[layer] = used & ~before[layer]
        before[layer] = now

    replay(trace, controller, watch=watch)
    decoded = list(tables.values())
    first = max(0, min(_MOMENTS, len(decoded) - _MOMENTS))
    return first, decoded[first : first + _MOMENTS]


def _cells(table: np.ndarray) -> str:
    return "".join(
        f"M{expert + 0.06:g} {layer + 0.06:g}h.88v.88h-.88z"
        for layer, expert in np.argwhere(table).tolist()
    )
