"""Sections of a report on hits and collisions by layer, and on prefetching."""

from moectl.report import queries
from moectl.report.charts import figure, legend, named_heatmap
from moectl.report.markup import Column, Section, data, nbytes, percent, table, whole
from moectl.report.reading import ReportSource, StoredBench, grouped, place
from moectl.show.charts import Bar, bars

_PREFETCH = (
    Column("preset", "preset"),
    Column("budget", "budget"),
    Column("prefetched", "prefetch_bytes", nbytes),
    Column("wasted", "wasted_bytes", nbytes),
    Column("used", "useful", percent),
    Column("late", "late", whole, "requests whose expert was still on its way"),
)


def layers(source: ReportSource, job: StoredBench) -> Section:
    """Hit rates and collisions by layer."""
    asked = queries.filled(queries.LAYERS, job=job.digest)
    rows = source.rows(asked)
    if not rows:
        return Section(
            "layers",
            "Layer by layer",
            missing="This bench is older than counts by layer: <code>moectl bench --again</code>.",
        )
    worst = max(row["collision_rate"] for row in rows)
    parts = []
    for _, same in grouped(rows, "budget", "link"):
        presets = [(name, group) for (name,), group in grouped(same, "preset")]
        for column, title, top in (
            ("hit_rate", "hit rate, %", 1.0),
            ("collision_rate", "collisions per 100", worst),
        ):
            kept = [
                (name, group)
                for name, group in presets
                if column == "hit_rate" or any(row[column] for row in group)
            ]
            if not kept:
                continue
            parts.append(
                figure(
                    named_heatmap(
                        f"{place(same[0])}: {title}",
                        [name for name, _ in kept],
                        [[row[column] for row in group] for _, group in kept],
                        shown=_hundredths,
                        top=top,
                        column="layer",
                        says=f"{title} of each preset by layer at {place(same[0])}",
                    )
                )
            )
    note = (
        "A collision is a miss on an expert evicted earlier in the same pass; presets without one "
        "are left out."
    )
    shades = legend("100", of="hit rate") + legend(data(worst, _hundredths), of="collisions")
    body = f'<p>{note}</p><div class="charts">{"".join(parts)}</div>{shades}'
    return Section("layers", "Layer by layer", body, (asked,))


def prefetching(source: ReportSource, job: StoredBench) -> Section:
    """The share of prefetched bytes that was used."""
    asked = queries.filled(queries.PREFETCH, job=job.digest)
    rows = source.rows(asked)
    if not rows:
        missing = (
            "No preset of this bench prefetched: <code>moectl bench --presets "
            "specmd,moe-infinity</code> shows some."
        )
        return Section("prefetch", "Prefetching", missing=missing)
    drawn = "".join(
        figure(
            bars(
                f"{place(same[0])}: used of what was prefetched",
                [
                    Bar(
                        row["preset"],
                        (row["useful"], 1 - row["useful"]),
                        percent(row["useful"]),
                        (row["useful"],),
                    )
                    for row in same
                ],
                top=1.0,
                says=f"Share of prefetched bytes that were used, by preset, at {place(same[0])}",
            )
        )
        for _, same in grouped(rows, "budget", "link")
    )
    key = '<p class="quiet"><i class="key p0"></i>used <i class="key p1"></i>wasted</p>'
    figures = table(rows, _PREFETCH, label="Prefetching by preset")
    lines = f"<details><summary>Bytes</summary>{figures}</details>"
    body = f'<div class="charts">{drawn}</div>{key}{lines}'
    return Section("prefetch", "Prefetching", body, (asked,))


def _hundredths(value: object) -> str:
    return f"{100 * float(value):.0f}"
