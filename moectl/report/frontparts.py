"""The section of a bench with its picture: time against quality, or time alone where quality is not
known."""

from collections.abc import Sequence

from moectl.report import queries
from moectl.report.charts import Point, dots, figure
from moectl.report.markup import Section, nbytes, times
from moectl.report.reading import Record, ReportSource, StoredBench, grouped, place
from moectl.show.scatter import Mark, loss_scale, scatter
from moectl.show.svg import Frame, log_scale

_TIMES = "time of a token, full = 1"
_MS = "milliseconds a token"
_LOST = "perplexity lost"
_BETTER = "Lower left is better: faster, and closer to the full model."
_KEY = {
    "exact": "same output as full",
    "altered": "altered output",
    "full": "full: all experts in the fast tier",
}
_NARROW_KEY = {"exact": "exact", "altered": "altered", "full": "full"}
_OF_PROMPTS = "The trace of this bench is of prompts alone: none decodes."


def front(source: ReportSource, job: StoredBench) -> Section:
    """A picture for each budget and link."""
    asked = queries.filled(queries.MARKS, job=job.digest)
    key = f"{job.mode}-front"
    rows = source.rows(asked)
    if not rows:
        return Section(key, "Time", missing=_OF_PROMPTS)
    if not any(row["loss"] is not None for row in rows):
        note = '<p class="quiet">A simulation does not know quality; a live bench measures it.</p>'
        return Section(key, "Time by preset", _key() + _dots(source, job, rows) + note, (asked,))
    return Section(key, "Time against quality", _scatters(source, job, rows), (asked,))


def _scatters(source: ReportSource, job: StoredBench, rows: Sequence[Record]) -> str:
    full = [row for row in rows if row["preset"] == "full"]
    drawn = []
    for (_, link), same in grouped(
        [row for row in rows if row["preset"] != "full"], "budget", "link"
    ):
        if any(row["is_ours"] for row in same):
            grounds = source.grounds(job, link)
            shown = [
                row
                for row in (*same, *full)
                if row["loss"] is not None and _time(row, grounds.is_absolute)
            ]
            title = f"{source.heading(job, same[0])}: {grounds.says}"
            drawn.append(_scatter(shown, title=title, is_absolute=grounds.is_absolute))
    return f'<p class="lead">{_BETTER}</p>{"".join(drawn)}'


def _scatter(rows: Sequence[Record], *, title: str, is_absolute: bool) -> str:
    """The picture twice, for a screen and for a phone; the page shows the one that suits its
    width."""
    marks = [Mark(_time(row, is_absolute), row["loss"], row["preset"], _kind(row)) for row in rows]
    names = ", ".join(mark.name for mark in marks)
    name = _MS if is_absolute else _TIMES
    drawn = []
    for kind, width, high, key in (("wide", 1000, 14, _KEY), ("narrow", 380, 24, _NARROW_KEY)):
        frame = Frame(width=width, height=300 + high * len(marks))
        x = log_scale([mark.x for mark in marks], name=name, **frame.across)
        y = loss_scale([mark.y for mark in marks], name=_LOST, **frame.upwards)
        says = f"{title}: {name} against {_LOST}, of {names}"
        drawn.append(
            figure(scatter(title, marks, x, y, frame, says=says, note="", key=key), kind=kind)
        )
    return "".join(drawn)


def _time(row: Record, is_absolute: bool) -> float | None:
    return row["tpot_ms"] if is_absolute else row["times_full"]


def _kind(row: Record) -> str:
    return "full" if row["preset"] == "full" else "exact" if row["is_lossless"] else "altered"


def _dots(source: ReportSource, job: StoredBench, rows: Sequence[Record]) -> str:
    """A row for each preset at all budgets, the fastest first."""
    is_absolute = all(source.grounds(job, row["link"]).is_absolute for row in rows)
    by_preset: dict[object, list[Record]] = {}
    for row in rows:
        if _time(row, is_absolute):
            by_preset.setdefault(row["preset"], []).append(row)
    ordered = sorted(by_preset.values(), key=lambda group: min(row["tpot_ms"] for row in group))
    largest = max(row["peak_fast_bytes"] for row in rows) or 1
    points = [[_point(row, largest, is_absolute) for row in group] for group in ordered]
    name = _MS if is_absolute else _TIMES
    title = "Every preset at every budget: left is better, larger marks take more of the fast tier"
    return figure(dots(title, points, name, says=f"{name} of each preset at each budget"))


def _point(row: Record, largest: int, is_absolute: bool) -> Point:
    times_full = (
        "" if row["times_full"] is None else f"{times(row['times_full'])} the time of full, "
    )
    return Point(
        x=_time(row, is_absolute),
        size=3.5 + 5 * (row["peak_fast_bytes"] / largest) ** 0.5,
        name=row["preset"],
        title=f"{row['preset']}, {place(row)}: {times_full}{nbytes(row['peak_fast_bytes'])}",
        values=(_time(row, is_absolute), row["peak_fast_bytes"]),
        kind="bound" if not row["is_ours"] else "exact" if row["is_lossless"] else "lossy",
    )


def _key() -> str:
    return (
        '<p class="quiet"><i class="key exact"></i>same output as full <i class="key '
        'lossy"></i>altered output <i class="key bound"></i>for comparison: full, and the oracle, '
        "which knows the future</p>"
    )
