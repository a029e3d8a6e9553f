"""Sections of a report on benches: recommendations, time against quality, the table, tuned presets."""

from collections.abc import Callable, Sequence
from html import escape

from artifacts.shape import FULL_BITS
from moectl.report import queries
from moectl.report.charts import FRAME, Point, dots, figure, loss_scale, scatter
from moectl.report.controlparts import controls
from moectl.report.layerparts import layers, prefetching
from moectl.report.markup import (
    Column,
    Section,
    code,
    data,
    nbytes,
    percent,
    ratio,
    short,
    table,
    times,
    whole,
)
from moectl.report.reading import Record, ReportSource, StoredBench, grouped, of_experts, place
from moectl.show.svg import log_scale

BENCH = "<code>moectl bench --presets all</code>"
_TITLES = {
    "summary": "What to run",
    "front": "Time beside quality",
    "bench": "Bench",
    "layers": "Layer by layer",
    "prefetch": "Prefetching",
}
_NAMES = {"live": "measured", "simulated": "simulated"}
_COLUMNS = (
    Column("preset", "preset"),
    Column("what", "mode", None, "measured live, simulated, or a peer: another program on the same checkpoint"),
    Column("link", "link"),
    Column("TPOT ms", "tpot_ms", short, "median time of a decoded token"),
    Column("× full", "times_full", times, "times the time of the preset full"),
    Column("perplexity ratio", "perplexity_ratio", ratio, "against the full model on the same text"),
    Column("top-1", "top1_agreement", percent, "equal first choices"),
    Column("KL", "kl", ratio, "nats, against the full model"),
    Column("hit rate", "hit_rate", percent),
    Column("stall ms", "exposed_ms", short, "time that compute waited for the link, in all"),
    Column("fast tier", "peak_fast_bytes", nbytes, "what experts take in the fast tier"),
    Column("tokens/s", "tokens_per_s", short),
    Column("TTFT ms", "ttft_ms", short, "time of a prompt"),
    Column("moved", "moved_bytes", nbytes, "bytes over the link, demanded and prefetched"),
    Column("wasted", "wasted_bytes", nbytes, "prefetched and not used"),
    Column("TPOT from", "tpot_lower", short, "first quartile"),
    Column("to", "tpot_upper", short, "third quartile"),
    Column("run", "run_id", whole, "of the store"),
)
_IMPORTED = (
    Column("what", "preset"),
    Column("settings", "link"),
    Column("TTFT ms", "ttft_ms", short),
    Column("TPOT ms", "tpot_ms", short),
    Column("tokens/s", "tokens_per_s", short),
    Column("run", "run_id", whole),
)
_TASKS = (
    Column("preset", "preset"),
    Column("budget", "budget"),
    Column("link", "link"),
    Column("task", "task"),
    Column("metric", "metric"),
    Column("value", "value", ratio),
    Column("+-", "stderr", ratio, "standard error over the documents"),
    Column("documents", "count", whole),
    Column("run", "run_id", whole, "of the store"),
)
_TUNED = (
    Column("preset", "name"),
    Column("budget", "budget"),
    Column("machine", "machine"),
    Column("may lose", "max_loss", percent, "share of perplexity that it was allowed to lose"),
    Column("TPOT ms", "tpot_ms", short, "measured live"),
    Column("perplexity ratio", "perplexity_ratio", ratio, "measured live"),
    *(Column(axis, axis) for axis in ("routing", "prefetch", "eviction", "miss", "residency", "scope")),
    Column("run", "run_id", whole),
)


def bench_sections(source: ReportSource) -> list[Section]:
    """The sections of the leading bench, with tables of all benches."""
    if not source.jobs:
        missing = f"No bench of this model yet: {BENCH} makes one."
        none = {key: Section(key, title, missing=missing) for key, title in _TITLES.items()}
        return [
            *(none[key] for key in ("summary", "front", "bench")),
            _tuned(source),
            none["layers"],
            none["prefetch"],
            controls(source, None),
        ]
    lead = source.jobs[0]
    return [
        _summary(source, lead),
        _front(source, lead),
        _table(source),
        _tuned(source),
        layers(source, lead),
        prefetching(source, lead),
        controls(source, lead),
    ]


def _summary(source: ReportSource, job: StoredBench) -> Section:
    asked = [one.format(job=job.digest) for one in (queries.SUMMARY, queries.BOUNDS, queries.CONDITIONS)]
    picks, bounds, [conditions] = map(source.rows, asked)
    cards = "".join(_card(row, job.mode) for row in picks)
    summary = f'{_lead(bounds)}<p class="quiet">{_CONDITIONS[job.mode](conditions)}{_base(conditions)}</p>'
    return Section("summary", _TITLES["summary"], f'{summary}<div class="cards">{cards}</div>', tuple(asked))


def _lead(bounds: Sequence[Record]) -> str:
    full = [row for row in bounds if row["preset"] == "full"]
    if not full or full[0]["tpot_ms"] is None:  # not simulated, or a trace without decoding
        return ""
    return f'<p class="lead">With every expert in the fast tier a token takes {data(full[0]["tpot_ms"])} ms.</p>'


def _measured(row: Record) -> str:
    where = escape(row["gpu"] or row["processor"])
    return (
        f"Measured live: {data(row['tokens'], whole)} tokens of {escape(row['data'])} in sequences of "
        f"{data(row['length'], whole)}; {_counted(row['rounds'], 'round')} in random order, on {where}, "
        f"{_counted(row['threads'], 'thread')}; medians. Quality is against the full model on the same tokens."
    )


def _simulated(row: Record) -> str:
    return (
        f"Simulated: {data(row['tokens'], whole)} tokens of {escape(row['data'])} on {escape(row['machine'])}, on "
        "virtual time, each setting from an empty cache. What a preset that alters the output loses is known after "
        "a live bench: the first choice here is the fastest that alters nothing."
    )


def _base(row: Record) -> str:
    """A sentence on the base of budgets and quality, if it is not the checkpoint."""
    experts = "" if row["base"] == FULL_BITS else f" Every expert is a replica of {data(row['base'], whole)} bits."
    dense = "" if row["dense"] is None else f" Dense weights have {data(row['dense'], whole)} bits."
    return experts + dense


def _counted(number: object, what: str) -> str:
    return f"{data(number, whole)} {what}{'' if number == 1 else 's'}"


_CONDITIONS: dict[str, Callable[[Record], str]] = {"live": _measured, "simulated": _simulated}


def _card(row: Record, mode: str) -> str:
    is_beside = row["plain_ms"] is not None and row["exact_preset"] != "on-demand"
    plain = f"{code('on-demand')} takes {data(row['plain_ms'])} ms." if is_beside else ""
    if row["good_preset"] not in (None, row["exact_preset"]):
        quality = f"perplexity ratio {data(row['good_ratio'], ratio)}"
        first = _big(row["good_preset"]) + _told("", row, "good", quality)
    elif row["exact_preset"] is not None:
        first = _big(row["exact_preset"]) + _told("", row, "exact", "the output is the full model's")
    else:
        first = _big(row["fast_preset"]) + _told("", row, "fast", "alters the output")
    lines = []
    if row["exact_preset"] is not None and row["good_preset"] not in (None, row["exact_preset"]):
        lines.append(_told(f"Without any loss {code(row['exact_preset'])}: ", row, "exact", ""))
    if row["fast_preset"] not in (row["good_preset"], row["exact_preset"]):
        price = "quality unknown" if mode != "live" else f"perplexity ratio {data(row['fast_ratio'], ratio)}"
        lines.append(_told(f"Fastest of all {code(row['fast_preset'])}: ", row, "fast", price))
    rest = "".join(f"<li>{line}</li>" for line in (*lines, plain) if line)
    return f'<article class="card"><h3>{escape(place(row))}</h3>{first}<ul>{rest}</ul></article>'


def _big(preset: object) -> str:
    return f'<p class="big">{code(preset)}</p>'


def _told(before: str, row: Record, which: str, after: str) -> str:
    relative = row[f"{which}_times"]
    beside = f", {data(relative, times)} the full model's" if relative is not None else ""
    return f"{before}{data(row[f'{which}_ms'])} ms a token{beside}{'; ' + after if after else ''}"


def _front(source: ReportSource, job: StoredBench) -> Section:
    asked = queries.PARETO.format(job=job.digest)
    rows = source.rows(asked)
    if not rows:
        return Section("front", _TITLES["front"], missing="The trace of this bench is of prompts alone: none decodes.")
    knows_loss = any(row["loss"] is not None for row in rows)
    drawn = _scatters(rows) if knows_loss else _dots(rows)
    kinds = '<p class="quiet"><i class="key exact"></i>output as the full model\'s <i class="key lossy"></i>altered '
    kinds += '<i class="key bound"></i>bounds and peers. Larger marks take more of the fast tier. '
    rule = "Named: nothing else at that budget is as fast, as good and as small." if knows_loss else _NO_QUALITY
    title = _TITLES["front"] if knows_loss else "Time by preset"
    return Section("front", title, f'<div class="charts">{drawn}</div>{kinds}{rule}</p>', (asked,))


_NO_QUALITY = "A simulation knows no quality: a live bench measures it."


def _scatters(rows: Sequence[Record]) -> str:
    """A chart for each budget and link of our presets, each with the full model."""
    full = [row for row in rows if row["preset"] == "full"]
    places = grouped([row for row in rows if row["preset"] != "full"], "budget", "link")
    ours = [same for _, same in places if any(row["is_ours"] for row in same)]
    return "".join(_scatter(same + full, rows) for same in ours)


def _scatter(rows: Sequence[Record], all_rows: Sequence[Record]) -> str:
    x = log_scale([row["tpot_ms"] for row in all_rows], name="ms per token", **FRAME.across)
    y = loss_scale([row["loss"] or 0.0 for row in all_rows], name="perplexity lost", **FRAME.upwards)
    known = [row for row in rows if row["loss"] is not None]
    points = [_point(row, _largest(all_rows)) for row in known]
    front = [point for row, point in zip(known, points, strict=True) if row["is_front"]]
    names = ", ".join(point.name for point in points if point.is_named)
    says = f"Milliseconds per token against perplexity lost at {place(rows[0])}; on the front: {names}"
    return figure(scatter(place(rows[0]), points, x, y, front=front, says=says))


def _dots(rows: Sequence[Record]) -> str:
    """A row for each preset at all budgets, the fastest first."""
    by_preset: dict[object, list[Record]] = {}
    for row in rows:
        by_preset.setdefault(row["preset"], []).append(row)
    ordered = sorted(by_preset.values(), key=lambda group: min(row["tpot_ms"] for row in group))
    points = [[_point(row, _largest(rows)) for row in group] for group in ordered]
    says = "Milliseconds per token of each preset at each budget"
    return figure(dots("Every preset at every budget", points, "ms per token", says=says))


def _largest(rows: Sequence[Record]) -> int:
    return max(row["peak_fast_bytes"] for row in rows) or 1


def _point(row: Record, largest: int) -> Point:
    kind = "bound" if not row["is_ours"] else "exact" if row["is_lossless"] else "lossy"
    quality = "" if row["loss"] is None else f", perplexity ratio {ratio(row['perplexity_ratio'])}"
    what = f"{row['preset']}, {place(row)}"
    return Point(
        x=row["tpot_ms"],
        y=row["loss"] or 0.0,
        size=3.5 + 5 * (row["peak_fast_bytes"] / largest) ** 0.5,
        name=row["preset"],
        title=f"{what}: {short(row['tpot_ms'])} ms{quality}, {nbytes(row['peak_fast_bytes'])}",
        values=(row["tpot_ms"], row["perplexity_ratio"], row["peak_fast_bytes"]),
        kind=kind,
        is_named=bool(row["is_front"]) or not row["is_ours"],
    )


def _table(source: ReportSource) -> Section:
    asked, parts = [], []
    for job in source.jobs:
        asked.append(queries.TABLE.format(job=job.digest))
        rows = source.rows(asked[-1])
        known = [column for column in _COLUMNS if _tells(column, rows)]
        for (budget,), same in grouped(rows, "budget"):
            heading = f"{of_experts(budget)}, {_NAMES[job.mode]}"
            parts.append(f"<h3>{escape(heading)}</h3>{table(same, known, label=heading)}")
        parts.append(_tasks(source, job, asked))
    imported = source.rows(queries.IMPORTED)
    if imported:
        asked.append(queries.IMPORTED)
        heading = "Imported: other tools, on another text"
        parts.append(f"<h3>{heading}</h3>{table(imported, _IMPORTED, label=heading)}")
    return Section("bench", _TITLES["bench"], "".join(parts), tuple(asked))


def _tasks(source: ReportSource, job: StoredBench, asked: list[str]) -> str:
    """Scores of a bench's tasks, if it has any; appends the query to `asked`."""
    query = queries.TASKS.format(job=job.digest)
    rows = source.rows(query)
    if not rows:
        return ""
    asked.append(query)
    heading = f"Tasks of lm-evaluation-harness, {_NAMES[job.mode]}"
    return f"<h3>{heading}</h3>{table(rows, _TASKS, label=heading)}"


def _tuned(source: ReportSource) -> Section:
    title = "Tuned presets"
    if source.newest("presets") is None:
        return Section("tuned", title, missing="Not in this store yet: <code>moectl tune</code> makes them.")
    asked = queries.TUNED.format(model=source.model_id)
    return Section("tuned", title, table(source.rows(asked), _TUNED, label=title), (asked,))


def _tells(column: Column, rows: Sequence[Record]) -> bool:
    """Whether a column has values that the heading does not state."""
    values = {row[column.name] for row in rows} - {None}
    return len(values) > 1 if column.name in ("mode", "link") else bool(values)
