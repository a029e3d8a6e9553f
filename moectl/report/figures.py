"""What the sections of a report show: choices among rows, and drawings of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moectl.charts.plots import Bar, Point, bars, dots, heatmap
from moectl.charts.scales import Drawing, Frame, Spread, log_scale, spanned
from moectl.charts.scatter import Mark, error_bar, loss_scale, scatter
from moectl.report.numbers import Format, hundredths, nbytes, percent, short, times
from moectl.report.reading import Record, ReportSource, StoredBench, grouped, place
from moectl.show.grounds import measured

_TIMES = "time of a token, full = 1"
_MS = "milliseconds a token"
_LOST = "perplexity lost"
_KEY = {
    "exact": "same output as full",
    "altered": "altered output",
    "full": "full: all experts in the fast tier",
}
_NARROW_KEY = {"exact": "exact", "altered": "altered", "full": "full"}
_OUTPUTS = {
    "Same output as the full model": True,
    "Altered output": False,
    "Not counted what was altered": None,
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: heading, column of the query, format of its values, and the meaning of
    the heading."""

    heading: str
    name: str
    shown: Format | None = None
    meaning: str = ""


def known(columns: Sequence[Column], groups: Mapping[str, Sequence[Record]]) -> list[Column]:
    """Return the columns that have a value in any row."""
    rows = [row for group in groups.values() for row in group]
    return [one for one in columns if any(row[one.name] is not None for row in rows)]


def advised(row: Record) -> list[str]:
    """Return the kinds of a summary's presets, a preset that is of several kinds once."""
    kinds: dict[object, str] = {}
    for kind in ("exact", "good", "fast"):
        kinds.setdefault(row[f"{kind}_preset"], kind)
    return [kind for preset, kind in kinds.items() if preset is not None]


def compared_with_buddies(rows: Sequence[Record]) -> tuple[Record, Record, Record, bool]:
    """Return of presets that replace experts, the cheapest first, the best, the best besides the
    buddies, the buddies, and whether the last two are told apart."""
    buddies = next(row for row in rows if row["preset"] == "buddymoe")
    rival = next(row for row in rows if row is not buddies)
    error = rival["error"]
    return rows[0], rival, buddies, error is not None and abs(rival["difference"]) > 2 * error


def has_ms(rows: Sequence[Record]) -> bool:
    """Return whether times of tuned presets mean something in milliseconds."""
    return all(measured(row["machine"]).is_absolute for row in rows)


def places(rows: Sequence[Record]) -> Iterator[tuple[list[Record], dict[str, list[Record]]]]:
    """Rows of a bench by budget and link, without and with the rows of `full`, these in groups:
    presets that keep the full model's output, then the others."""
    full = [row for row in rows if row["preset"] == "full"]
    for _, same in grouped([row for row in rows if row["preset"] != "full"], "budget", "link"):
        groups = {
            title: [row for row in same if row["is_ours"] and row["is_lossless"] is kept]
            for title, kept in _OUTPUTS.items()
        }
        others = [row for row in same if not row["is_ours"]]
        yield same, groups | {"For comparison": [*full, *others]}


def kind_of(row: Record) -> str:
    """Return the kind of a preset's mark: `full`, or by its output `exact` or `altered`."""
    return "full" if row["preset"] == "full" else "exact" if row["is_lossless"] else "altered"


def time_and_quality(
    source: ReportSource, job: StoredBench, rows: Sequence[Record]
) -> Iterator[tuple[str, Drawing]]:
    """Draw a picture for each budget and link twice, for a screen and for a phone; the page shows
    the one that suits its width. On a phone presets that another beats have no names."""
    for same, groups in places(rows):
        if not any(row["is_ours"] for row in same):
            continue
        grounds = source.grounds(job, same[0]["link"])
        full = [row for row in groups["For comparison"] if row["preset"] == "full"]
        marks = [
            mark(row, grounds.is_absolute)
            for row in (*same, *full)
            if row["loss"] is not None and _time(row, grounds.is_absolute)
        ]
        title = f"{source.heading(job, same[0])}: {grounds.says}"
        name = _MS if grounds.is_absolute else _TIMES
        yield "wide", _scatter(marks, title, name, _KEY, width=1000, height=300 + 8 * len(marks))
        best = [replace(one, is_named=not _is_beaten(one, marks)) for one in marks]
        yield "narrow", _scatter(best, title, name, _NARROW_KEY, width=380, height=340)


def mark(row: Record, is_absolute: bool) -> Mark:
    """Return the mark of a preset, with bars of its errors."""
    return Mark(
        _time(row, is_absolute),
        row["loss"],
        row["preset"],
        kind_of(row),
        across=_spread(row, is_absolute),
        upwards=error_bar(row["loss"], row["error"]),
    )


def times_by_preset(source: ReportSource, job: StoredBench, rows: Sequence[Record]) -> Drawing:
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
    return dots(title, points, name, says=f"{name} of each preset at each budget")


def by_layer(rows: Sequence[Record]) -> Iterator[Drawing]:
    """Draw hit rates, and collisions where there are any, of each preset by layer."""
    worst = max(row["collision_rate"] for row in rows)
    for _, same in grouped(rows, "budget", "link"):
        for column, title, top in (
            ("hit_rate", "hit rate, %", 1.0),
            ("collision_rate", "collisions per 100", worst),
        ):
            kept = {
                name: [row[column] for row in group]
                for (name,), group in grouped(same, "preset")
                if column == "hit_rate" or any(row[column] for row in group)
            }
            if kept:
                yield heatmap(
                    f"{place(same[0])}: {title}",
                    list(kept.values()),
                    names=list(kept),
                    shown=hundredths,
                    top=top,
                    row="preset",
                    column="layer",
                    says=f"{title} of each preset by layer at {place(same[0])}",
                )


def used_of_prefetched(rows: Sequence[Record]) -> Drawing:
    """The share of prefetched bytes that was used, by preset."""
    shares = [(row["preset"], row["useful"]) for row in rows]
    return bars(
        f"{place(rows[0])}: used of what was prefetched",
        [Bar(preset, (share, 1 - share), percent(share), (share,)) for preset, share in shares],
        top=1.0,
        says=f"Share of prefetched bytes that were used, by preset, at {place(rows[0])}",
    )


def split_experts(rows: Sequence[Record]) -> Drawing:
    """Whole experts' worth and cached experts of each layer."""
    return bars(
        "Experts of each layer in the fast tier: whole ones' worth, and what is cut off those that "
        "are cached",
        [
            Bar(
                f"layer {row['layer']}",
                (row["budget"], max(row["cache_size"] - row["budget"], 0)),
                f"{short(row['budget'])} of {row['cache_size']}, theta {short(row['theta'])}",
                (row["budget"], row["cache_size"], row["theta"]),
            )
            for row in rows
        ],
        top=max(max(row["budget"], row["cache_size"]) for row in rows),
        says="Budget and cached experts of each layer",
    )


def matrix(rows: Sequence[Record], down: str, across: str, value: str) -> list[list[float | None]]:
    """Rows as a matrix; cells without a row are None."""
    width = max(row[across] for row in rows) + 1
    cells: list[list[float | None]] = [
        [None] * width for _ in range(max(row[down] for row in rows) + 1)
    ]
    for row in rows:
        cells[row[down]][row[across]] = row[value]
    return cells


def largest(rows: Sequence[Record], value: str) -> float:
    """Return the largest value of a column; 1 where none is known."""
    return max((row[value] for row in rows if row[value] is not None), default=1.0)


def _scatter(
    marks: Sequence[Mark], title: str, name: str, key: dict[str, str], *, width: int, height: int
) -> Drawing:
    frame = Frame(width=width, height=height)
    x = log_scale(spanned((one.x, one.across) for one in marks), name=name, **frame.across)
    y = loss_scale(spanned((one.y, one.upwards) for one in marks), name=_LOST, **frame.upwards)
    says = f"{title}: {name} against {_LOST}, of {', '.join(one.name for one in marks)}"
    return scatter(title, marks, x, y, frame, says=says, note="", key=key)


def _is_beaten(one: Mark, marks: Sequence[Mark]) -> bool:
    """Return whether a preset other than `full` is faster and loses no more."""
    others = (other for other in marks if other.kind != "full")
    return any(other.x < one.x and max(other.y, 0) <= max(one.y, 0) for other in others)


def _spread(row: Record, is_absolute: bool) -> Spread:
    """Return the quartiles of a time, where they were measured."""
    kind = "tpot" if is_absolute else "times"
    ends = (row[f"{kind}_lower"], row[f"{kind}_upper"])
    return None if None in ends else ends


def _time(row: Record, is_absolute: bool) -> float | None:
    return row["tpot_ms"] if is_absolute else row["times_full"]


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
        spread=_spread(row, is_absolute),
    )
