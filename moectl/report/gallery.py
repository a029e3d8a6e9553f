"""Pictures of a store's knowledge of a model: measurements, replicas, and its newest trace."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from artifacts.quantisation.widths import WIDTHS
from artifacts.shape import Shape
from artifacts.store.rows import quant_loss_matrices
from artifacts.store.store import Store
from artifacts.traces.parquet import from_table
from artifacts.traces.trace import Trace
from moectl.charts.plots import Line, lines
from moectl.charts.scales import Drawing, Frame, linear_scale, log_scale
from moectl.charts.scatter import Mark, loss_scale, scatter
from moectl.report import queries, tracepictures
from moectl.report.reading import Record, ReportSource, of_experts
from moectl.show.demonstration import FULL, KEY
from moectl.show.grounds import measured

_TOKENS = 1024  # of a trace: more make the same pictures, later


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
    drawn: dict[str, Callable[[Trace, Shape], Drawing]] = {
        "hit-rates": tracepictures.hit_rates,
        "residency": tracepictures.residency,
        "routing": tracepictures.routing,
        "skew": tracepictures.skew,
    }
    for name, draw in drawn.items():
        yield Picture(
            name, draw(trace, shape) if trace else None, "a trace: moectl profile --trace"
        )


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
    marks = [
        Mark(row["times_full"], max(0.0, row["loss"]), row["preset"], _kind(row)) for row in shown
    ]
    frame = Frame(width=tracepictures.WIDTH, height=400, left=62, right=20, top=28)
    x = linear_scale(
        1.12 * max(mark.x for mark in marks), name="time of a token, full model = 1", **frame.across
    )
    y = loss_scale([mark.y for mark in marks], name="perplexity lost", **frame.upwards)
    title = f"Time and quality with {of_experts(budget)} in fast memory"
    note = f"{measured(link).says}; lower left is better"
    listed = "; ".join(f"{mark.name} {mark.x:.1f}, {100 * mark.y:.1f} %" for mark in marks)
    return scatter(title, marks, x, y, frame, says=f"{title}: {listed}", note=note, key=KEY)


def _kind(row: Record) -> str:
    return "full" if row["preset"] == FULL else "exact" if row["is_lossless"] else "altered"


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
    frame = Frame(width=tracepictures.WIDTH, left=66, right=110)
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
    return trace.take(np.flatnonzero(passes <= passes[tokens[:_TOKENS][-1]])), shape


def _shape(store: Store, model_id: str | None) -> Shape | None:
    return next((model.shape for model in store.models() if model.model_id == model_id), None)
