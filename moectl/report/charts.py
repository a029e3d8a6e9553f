"""Charts of the report alone, and the HTML figure around a drawing: marks carry the values they stand for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from moectl.report.markup import Format
from moectl.show.charts import WIDTH
from moectl.show.svg import LEVELS, AxisScale, Drawing, Frame, axes, exact, log_scale, name_width, shade_of

FRAME = Frame()


@dataclass(frozen=True, slots=True)
class Point:
    """A mark of a scatter plot: its place, size and name, its tooltip `title`, and the exact values behind it."""

    x: float
    y: float
    size: float
    name: str
    title: str
    values: tuple[object, ...]
    kind: str
    is_named: bool


def figure(drawing: Drawing) -> str:
    """A drawing on a page, below its title."""
    width = drawing.width
    svg = (
        f'<svg viewBox="0 0 {width:g} {drawing.height:g}" style="max-width:{width * 1.3:.0f}px" role="img" '
        f'aria-label="{escape(drawing.says)}">{drawing.inside}</svg>'
    )
    return f"<figure><figcaption>{escape(drawing.title)}</figcaption>{svg}</figure>"


def loss_scale(losses: Sequence[float], *, name: str, start: float, end: float) -> AxisScale:
    """Linear below a thousandth and logarithmic above, so that small and large losses are seen. Gains count as 0."""
    linear = 1e-3

    def bent(value: float) -> float:
        return math.asinh(max(value, 0.0) / linear)

    top = max(bent(max(losses, default=0.0)) * 1.08, bent(0.02))
    ticks = tuple((v, f"{100 * v:g}%") for v in (0, 1e-3, 1e-2, 1e-1, 1.0, 10.0) if bent(v) <= top)
    return AxisScale(lambda value: start + bent(value) / top * (end - start), ticks, name)


def scatter(
    title: str, points: Sequence[Point], x: AxisScale, y: AxisScale, *, front: Sequence[Point], says: str
) -> Drawing:
    """Points on two scales made for `FRAME`; a line joins those of `front` that lie lower than all to their left."""
    marks = "".join(
        _circle(point, x.place(point.x), y.place(point.y)) for point in sorted(points, key=lambda point: -point.size)
    )
    line = " ".join(f"{x.place(p.x):.1f},{y.place(p.y):.1f}" for p in _falling(front))
    joined = f'<polyline class="front" points="{line}"/>' if len(front) > 1 else ""
    inside = axes(x, y, FRAME) + joined + marks + _names([p for p in points if p.is_named], x, y)
    return Drawing(title, inside, WIDTH, FRAME.height, says)


def dots(title: str, rows: Sequence[Sequence[Point]], name: str, *, says: str) -> Drawing:
    """Rows of points, each row with its name, on one logarithmic scale; `y` of the points is not used."""
    left, high = name_width([row[0].name for row in rows]), 20
    values = [point.x for row in rows for point in row]
    x = log_scale(values, name=name, start=left, end=WIDTH - FRAME.right)
    foot = len(rows) * high
    drawn = [
        f'<line class="grid" x1="{x.place(v):.1f}" x2="{x.place(v):.1f}" y1="0" y2="{foot}"/>'
        f'<text class="tick" x="{x.place(v):.1f}" y="{foot + 14}">{text}</text>'
        for v, text in x.ticks
    ]
    for index, row in enumerate(rows):
        at = index * high + high / 2
        drawn.append(f'<text class="name" x="{left - 6:g}" y="{at + 4:g}">{escape(row[0].name)}</text>')
        drawn += [_circle(point, x.place(point.x), at) for point in row]
    label = f'<text class="axis" x="{(left + WIDTH - FRAME.right) / 2:.1f}" y="{foot + 30}">{escape(name)}</text>'
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
    left, right = name_width(names), 6
    across = max(map(len, rows))
    size = (WIDTH - left - right) / across
    is_written, high = size >= 26, 20
    cells = []
    for index, row in enumerate(rows):
        upper = index * high
        cells.append(f'<text class="name" x="{left - 6:g}" y="{upper + 14}">{escape(names[index])}</text>')
        for number, value in enumerate(row):
            if value is not None:
                cells.append(_cell(value, top, left + number * size, upper, size, high, is_written, shown))
    foot = len(rows) * high
    every = max(1, round(across / 8))
    ticks = "".join(
        f'<text class="tick" x="{left + (number + 0.5) * size:.1f}" y="{foot + 14}">{number}</text>'
        for number in range(0, across, every)
    )
    label = f'<text class="axis" x="{left + across * size / 2:.1f}" y="{foot + 30}">{escape(column)}</text>'
    return Drawing(title, "".join(cells) + ticks + label, WIDTH, foot + 36, says)


def legend(most: str, *, of: str = "") -> str:
    """The shades of a heatmap, from 0 to `most`, as HTML; `of` names the quantity."""
    steps = "".join(f'<i class="b{shade}"></i>' for shade in range(LEVELS))
    return f'<p class="legend"><span>{escape(of)} 0</span>{steps}<span>{most}</span></p>'


def _falling(points: Sequence[Point]) -> list[Point]:
    """The points, from left to right, that lie lower than all before them."""
    lowest: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, point.y)):
        if not lowest or point.y < lowest[-1].y:
            lowest.append(point)
    return lowest


def _circle(point: Point, across: float, upper: float) -> str:
    values = " ".join(map(exact, point.values))
    return (
        f'<circle class="{point.kind}" cx="{across:.1f}" cy="{upper:.1f}" r="{point.size:.1f}" '
        f'data-values="{values}"><title>{escape(point.title)}</title></circle>'
    )


def _names(points: Sequence[Point], x: AxisScale, y: AxisScale) -> str:
    """Names beside their points: moved up or down where two would overlap, to the left where the right has no room."""
    taken: list[tuple[float, float, float]] = []
    drawn = []
    for point in sorted(points, key=lambda point: (y.place(point.y), x.place(point.x))):
        wide = 6.8 * len(point.name)
        across = x.place(point.x)
        is_left = across + point.size + 5 + wide > WIDTH
        begin = across - point.size - 5 - wide if is_left else across + point.size + 5
        upper = y.place(point.y) + 4
        free = next(
            shift
            for turn in range(40)
            for shift in (-13.0 * turn, 13.0 * turn)
            if FRAME.top <= upper + shift <= FRAME.height - FRAME.bottom + 4
            and all(abs(upper + shift - other) >= 12 or begin > b or begin + wide < a for other, a, b in taken)
        )
        taken.append((upper + free, begin, begin + wide))
        if free:
            near = begin + wide if is_left else begin
            ends = f'x1="{across:.1f}" y1="{upper - 4:.1f}" x2="{near:.1f}" y2="{upper + free - 4:.1f}"'
            drawn.append(f'<line class="lead" {ends}/>')
        drawn.append(f'<text class="mark" x="{begin:.1f}" y="{upper + free:.1f}">{escape(point.name)}</text>')
    return "".join(drawn)


def _cell(
    value: float, top: float, x: float, y: float, wide: float, high: float, is_written: bool, shown: Format
) -> str:
    shade = shade_of(value, top)
    written = (
        f'<text class="t{shade}" x="{x + wide / 2:.1f}" y="{y + 14:g}">{escape(shown(value))}</text>'
        if is_written
        else ""
    )
    return (
        f'<g data-values="{exact(value)}"><title>{escape(shown(value))}</title><rect class="s{shade}" x="{x:.1f}" '
        f'y="{y:g}" width="{wide - 1:.1f}" height="{high - 1:g}"/>{written}</g>'
    )
