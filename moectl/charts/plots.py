"""Charts that the report and picture files share: lines, bars and heatmaps, as drawings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby

from moectl.charts.scales import (
    LEVELS,
    AxisScale,
    Drawing,
    Frame,
    axes,
    exact,
    name_width,
    round_step,
    shade_of,
)

WIDTH = 380  # of a chart on a page


@dataclass(frozen=True, slots=True)
class Line:
    """Points (x, y) in a colour: `strong`, `warm`, `fresh`, `ink` or `quiet`."""

    points: Sequence[tuple[float, float]]
    colour: str
    name: str = ""
    is_dashed: bool = False
    has_dots: bool = False


def lines(
    title: str, drawn: Sequence[Line], x: AxisScale, y: AxisScale, frame: Frame, *, says: str
) -> Drawing:
    """Lines on two scales made for `frame`; those with a name are listed in its right margin."""
    marks = "".join(_line(line, x, y) for line in drawn)
    edge = frame.width - frame.right + 14
    keys = [
        f'<g class="{line.colour}"><path class="line" d="M{edge:g} {at - 4}h18"/>'
        f'<text class="value" x="{edge + 24:g}" y="{at}">{escape(line.name)}</text></g>'
        for at, line in zip(
            range(int(frame.top) + 14, 10_000, 20),
            filter(lambda line: line.name, drawn),
            strict=False,
        )
    ]
    return Drawing(
        title, axes(x, y, frame) + marks + "".join(keys), frame.width, frame.height, says
    )


def _line(line: Line, x: AxisScale, y: AxisScale) -> str:
    places = [(x.place(across), y.place(upwards)) for across, upwards in line.points]
    joined = " ".join(f"{across:.1f},{upper:.1f}" for across, upper in places)
    dots = "".join(
        f'<circle class="dot" cx="{across:.1f}" cy="{upper:.1f}" r="3"/>'
        for across, upper in places
    )
    dashed = ' stroke-dasharray="5 4"' if line.is_dashed else ""
    polyline = f'<polyline class="line"{dashed} points="{joined}"/>'
    return f'<g class="{line.colour}">{polyline}{dots if line.has_dots else ""}</g>'


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of a bar chart: parts from the left, in classes `p0`, `p1`, ...; the text at its end;
    exact values."""

    name: str
    parts: tuple[float, ...]
    text: str
    values: tuple[object, ...]


def bars(
    title: str,
    rows: Sequence[Bar],
    *,
    top: float,
    says: str,
    width: float = WIDTH,
    parts: Sequence[str] = (),
) -> Drawing:
    """Horizontal bars from 0 to `top`; `parts` names what their colours stand for, in a line below
    them."""
    left = name_width([bar.name for bar in rows])
    right = 7.0 * max(len(bar.text) for bar in rows) + 10
    high = 20
    room = width - left - right
    drawn = []
    for index, bar in enumerate(rows):
        upper = index * high
        at = left
        drawn.append(
            f'<text class="name" x="{left - 6:g}" y="{upper + 14}">{escape(bar.name)}</text>'
        )
        values = " ".join(map(exact, bar.values))
        drawn.append(
            f'<g data-values="{values}"><title>{escape(f"{bar.name}: {bar.text}")}</title>'
        )
        for number, part in enumerate(bar.parts):
            wide = room * part / top
            drawn.append(
                f'<rect class="p{number}" x="{at:.1f}" y="{upper + 3}" width="{wide:.1f}" '
                'height="14"/>'
            )
            at += wide
        drawn.append(
            f'<text class="value" x="{left + room + 6:.1f}" '
            f'y="{upper + 14}">{escape(bar.text)}</text></g>'
        )
    foot = len(rows) * high + 4
    drawing = Drawing(title, "".join(drawn), width, foot, says)
    return (
        replace(drawing, inside=drawing.inside + _part_key(parts, left, foot + 8), height=foot + 24)
        if parts
        else drawing
    )


def _part_key(parts: Sequence[str], left: float, upper: float) -> str:
    drawn = []
    at = left
    for number, name in enumerate(parts):
        drawn.append(f'<rect class="p{number}" x="{at:.1f}" y="{upper:g}" width="11" height="11"/>')
        drawn.append(
            f'<text class="value" x="{at + 16:.1f}" y="{upper + 10:g}">{escape(name)}</text>'
        )
        at += 7.0 * len(name) + 36
    return "".join(drawn)


def heatmap(
    title: str,
    matrix: Sequence[Sequence[float | None]],
    *,
    top: float,
    row: str,
    column: str,
    says: str,
    width: float = WIDTH,
) -> Drawing:
    """A large matrix in shades from 0 to `top`: one path a shade, so that thousands of cells stay
    small."""
    across = max(map(len, matrix))
    down = len(matrix)
    wide = (width - 34) / across
    high = min(wide, width / down) if down > across / 3 else max(wide, min(18.0, 160 / down))
    grid = f'<g transform="translate(30 0) scale({wide:.4f} {high:.4f})">{_cells(matrix, top)}</g>'
    foot = down * high
    ticks = "".join(
        f'<text class="tick" x="{30 + (n + 0.5) * wide:.1f}" y="{foot + 13:.1f}">{n}</text>'
        for n in _few(across)
    ) + "".join(
        f'<text class="tick end" x="25" y="{(n + 0.5) * high + 4:.1f}">{n}</text>'
        for n in (range(down) if down <= 16 and high >= 12 else _few(down))
    )
    middle = foot / 2
    label = (
        f'<text class="axis" x="{30 + across * wide / 2:.1f}" '
        f'y="{foot + 28:.1f}">{escape(column)}</text>'
    )
    label += (
        f'<text class="axis" transform="translate(9 {middle:.1f}) rotate(-90)">{escape(row)}</text>'
    )
    return Drawing(title, grid + ticks + label, width, foot + 34, says)


def with_shades(drawing: Drawing, most: str) -> Drawing:
    """A heatmap with its shades below it, from 0 to `most`."""
    upper = drawing.height + 4
    steps = "".join(
        f'<rect class="s{shade}" x="{48 + 21 * shade}" y="{upper:.1f}" width="21" height="12"/>'
        for shade in range(LEVELS)
    )
    ends = f'<text class="tick end" x="42" y="{upper + 10:.1f}">0</text>'
    ends += f'<text class="value" x="{54 + 21 * LEVELS}" y="{upper + 10:.1f}">{escape(most)}</text>'
    return replace(drawing, inside=drawing.inside + steps + ends, height=upper + 14)


def _cells(matrix: Sequence[Sequence[float | None]], top: float) -> str:
    """One path a shade; neighbours of one shade in a row are one rectangle. Cells that are None
    stay empty."""
    shades: dict[int, list[str]] = {}
    for index, line in enumerate(matrix):
        number = 0
        for shade, same in groupby(
            line, key=lambda value: None if value is None else shade_of(value, top)
        ):
            count = len(list(same))
            if shade is not None:
                shades.setdefault(shade, []).append(f"M{number} {index}h{count}v1h-{count}z")
            number += count
    return "".join(
        f'<path class="s{shade}" d="{"".join(drawn)}"/>' for shade, drawn in sorted(shades.items())
    )


def _few(count: int) -> list[int]:
    """Some numbers below `count`, evenly spaced and round."""
    step = max(1, int(round_step(count / 5)))
    return list(range(0, count, step))
