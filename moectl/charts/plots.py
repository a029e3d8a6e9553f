"""Charts of lines, bars, rows of points and heatmaps, as drawings; marks carry the values they
stand for."""

from collections.abc import Callable, Mapping, Sequence
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
    log_scale,
    name_width,
    round_step,
    shade_of,
)

WIDTH = 380  # of a chart on a page
_ROW = 20  # pixels of a named row


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


def bars(title: str, rows: Sequence[Bar], *, top: float, says: str) -> Drawing:
    """Horizontal bars from 0 to `top`."""
    left = name_width([bar.name for bar in rows])
    right = 7.0 * max(len(bar.text) for bar in rows) + 10
    room = WIDTH - left - right
    drawn = []
    for index, bar in enumerate(rows):
        upper = index * _ROW
        at = left
        values = " ".join(map(exact, bar.values))
        drawn.append(
            f'{_row_name(bar.name, left, upper)}<g data-values="{values}">'
            f"<title>{escape(f'{bar.name}: {bar.text}')}</title>"
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
    return Drawing(title, "".join(drawn), WIDTH, len(rows) * _ROW + 4, says)


@dataclass(frozen=True, slots=True)
class Point:
    """A mark in a row: its place, size and name, its tooltip `title`, and the exact values behind
    it. `kind` is the class of its colour."""

    x: float
    size: float
    name: str
    title: str
    values: tuple[object, ...]
    kind: str


def dots(title: str, rows: Sequence[Sequence[Point]], name: str, *, says: str) -> Drawing:
    """Rows of points, each row with its name, on one logarithmic scale."""
    left = name_width([row[0].name for row in rows])
    end = WIDTH - 14
    x = log_scale([point.x for row in rows for point in row], name=name, start=left, end=end)
    foot = len(rows) * _ROW
    ticks = [(x.place(value), text) for value, text in x.ticks]
    drawn = [
        f'<line class="grid" x1="{across:.1f}" x2="{across:.1f}" y1="0" y2="{foot}"/>'
        for across, _ in ticks
    ]
    for index, row in enumerate(rows):
        drawn.append(_row_name(row[0].name, left, index * _ROW))
        drawn += [
            f'<circle class="{point.kind}" cx="{x.place(point.x):.1f}" '
            f'cy="{(index + 0.5) * _ROW:g}" r="{point.size:.1f}" '
            f'data-values="{" ".join(map(exact, point.values))}">'
            f"<title>{escape(point.title)}</title></circle>"
            for point in row
        ]
    drawn.append(_below(ticks, name, foot, (left + end) / 2))
    return Drawing(title, "".join(drawn), WIDTH, foot + 34, says)


def named_heatmap(
    title: str,
    rows: Mapping[str, Sequence[float | None]],
    *,
    shown: Callable[[object], str],
    top: float,
    column: str,
    says: str,
) -> Drawing:
    """Few rows by name, columns numbered from 0. Cells wide enough carry their value as text."""
    left = name_width(list(rows))
    across = max(map(len, rows.values()))
    wide = (WIDTH - left - 6) / across
    drawn = []
    for index, (name, values) in enumerate(rows.items()):
        upper = index * _ROW
        drawn.append(_row_name(name, left, upper))
        for number, value in enumerate(values):
            if value is None:
                continue
            at = left + number * wide
            shade = shade_of(value, top)
            text = escape(shown(value))
            drawn.append(
                f'<g data-values="{exact(value)}"><title>{text}</title><rect class="s{shade}" '
                f'x="{at:.1f}" y="{upper}" width="{wide - 1:.1f}" height="{_ROW - 1}"/>'
            )
            if wide >= 26:
                drawn.append(
                    f'<text class="t{shade}" x="{at + wide / 2:.1f}" y="{upper + 14}">{text}</text>'
                )
            drawn.append("</g>")
    foot = len(rows) * _ROW
    every = max(1, round(across / 8))
    ticks = [(left + (number + 0.5) * wide, str(number)) for number in range(0, across, every)]
    drawn.append(_below(ticks, column, foot, left + across * wide / 2))
    return Drawing(title, "".join(drawn), WIDTH, foot + 34, says)


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
    below = [(30 + (number + 0.5) * wide, str(number)) for number in _few(across)]
    beside = "".join(
        f'<text class="tick end" x="25" y="{(number + 0.5) * high + 4:.1f}">{number}</text>'
        for number in (range(down) if down <= 16 and high >= 12 else _few(down))
    )
    label = (
        f'<text class="axis" transform="translate(9 {foot / 2:.1f}) '
        f'rotate(-90)">{escape(row)}</text>'
    )
    ticks = _below(below, column, foot, 30 + across * wide / 2)
    return Drawing(title, grid + ticks + beside + label, width, foot + 34, says)


def _row_name(name: str, left: float, upper: float) -> str:
    return f'<text class="name" x="{left - 6:g}" y="{upper + 14}">{escape(name)}</text>'


def _below(ticks: Sequence[tuple[float, str]], name: str, foot: float, middle: float) -> str:
    """The ticks of the horizontal axis, and its name."""
    drawn = [
        f'<text class="tick" x="{across:.1f}" y="{foot + 13:.1f}">{text}</text>'
        for across, text in ticks
    ]
    drawn.append(f'<text class="axis" x="{middle:.1f}" y="{foot + 28:.1f}">{escape(name)}</text>')
    return "".join(drawn)


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
