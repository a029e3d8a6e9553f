"""Charts of the report alone, and the HTML figure around a drawing: marks carry the values they
stand for."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from moectl.charts.plots import WIDTH
from moectl.charts.scales import Drawing, exact, log_scale, name_width, shade_of
from moectl.report.numbers import Format


@dataclass(frozen=True, slots=True)
class Point:
    """A mark in a row: its place, size and name, its tooltip `title`, and the exact values behind
    it."""

    x: float
    size: float
    name: str
    title: str
    values: tuple[object, ...]
    kind: str


def dots(title: str, rows: Sequence[Sequence[Point]], name: str, *, says: str) -> Drawing:
    """Rows of points, each row with its name, on one logarithmic scale."""
    left = name_width([row[0].name for row in rows])
    high = 20
    values = [point.x for row in rows for point in row]
    x = log_scale(values, name=name, start=left, end=WIDTH - 14)
    foot = len(rows) * high
    drawn = [
        f'<line class="grid" x1="{x.place(v):.1f}" x2="{x.place(v):.1f}" y1="0" y2="{foot}"/>'
        f'<text class="tick" x="{x.place(v):.1f}" y="{foot + 14}">{text}</text>'
        for v, text in x.ticks
    ]
    for index, row in enumerate(rows):
        at = index * high + high / 2
        drawn.append(
            f'<text class="name" x="{left - 6:g}" y="{at + 4:g}">{escape(row[0].name)}</text>'
        )
        drawn += [_circle(point, x.place(point.x), at) for point in row]
    label = (
        f'<text class="axis" x="{(left + WIDTH - 14) / 2:.1f}" '
        f'y="{foot + 30}">{escape(name)}</text>'
    )
    return Drawing(title, "".join(drawn) + label, WIDTH, foot + 36, says)


def named_heatmap(
    title: str,
    names: Sequence[str],
    rows: Sequence[Sequence[float | None]],
    *,
    shown: Format,
    top: float,
    column: str,
    says: str,
) -> Drawing:
    """Few named rows, columns numbered from 0. Cells wide enough carry their value as text."""
    left = name_width(names)
    right = 6
    across = max(map(len, rows))
    size = (WIDTH - left - right) / across
    is_written = size >= 26
    high = 20
    cells = []
    for index, row in enumerate(rows):
        upper = index * high
        cells.append(
            f'<text class="name" x="{left - 6:g}" y="{upper + 14}">{escape(names[index])}</text>'
        )
        for number, value in enumerate(row):
            if value is not None:
                cells.append(
                    _cell(value, top, left + number * size, upper, size, high, is_written, shown)
                )
    foot = len(rows) * high
    every = max(1, round(across / 8))
    ticks = "".join(
        f'<text class="tick" x="{left + (number + 0.5) * size:.1f}" y="{foot + 14}">{number}</text>'
        for number in range(0, across, every)
    )
    label = (
        f'<text class="axis" x="{left + across * size / 2:.1f}" '
        f'y="{foot + 30}">{escape(column)}</text>'
    )
    return Drawing(title, "".join(cells) + ticks + label, WIDTH, foot + 36, says)


def _circle(point: Point, across: float, upper: float) -> str:
    values = " ".join(map(exact, point.values))
    return (
        f'<circle class="{point.kind}" cx="{across:.1f}" cy="{upper:.1f}" r="{point.size:.1f}" '
        f'data-values="{values}"><title>{escape(point.title)}</title></circle>'
    )


def _cell(
    value: float,
    top: float,
    x: float,
    y: float,
    wide: float,
    high: float,
    is_written: bool,
    shown: Format,
) -> str:
    shade = shade_of(value, top)
    written = (
        (
            f'<text class="t{shade}" x="{x + wide / 2:.1f}" '
            f'y="{y + 14:g}">{escape(shown(value))}</text>'
        )
        if is_written
        else ""
    )
    return (
        f'<g data-values="{exact(value)}"><title>{escape(shown(value))}</title><rect '
        f'class="s{shade}" x="{x:.1f}" y="{y:g}" width="{wide - 1:.1f}" '
        f'height="{high - 1:g}"/>{written}</g>'
    )
