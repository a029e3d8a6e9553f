"""Charts as inline SVG: marks carry the values they stand for, colours follow the page's theme."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from moectl.report.markup import Format, exact

_WIDTH, _HEIGHT = 380, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 16, 42
LEVELS = 9  # shades of a heatmap
_DECADES = (1, 2, 5)


@dataclass(frozen=True, slots=True)
class Point:
    """A mark of a scatter: where it lies, how large it is, what it is called and said to be; `values` are exact."""

    x: float
    y: float
    size: float
    name: str
    title: str
    values: tuple[object, ...]
    kind: str
    is_named: bool


@dataclass(frozen=True, slots=True)
class Scale:
    """Values onto pixels. `ticks` are values with their text."""

    place: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]
    name: str


def figure(title: str, inside: str, *, width: float, height: float, says: str) -> str:
    """A chart with its caption; `says` is what it shows in a sentence, for whoever cannot see it."""
    drawn = (
        f'<svg viewBox="0 0 {width:g} {height:g}" style="max-width:{width * 1.3:.0f}px" role="img" '
        f'aria-label="{escape(says)}">{inside}</svg>'
    )
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>"


def log_scale(values: Sequence[float], *, name: str, start: float, end: float) -> Scale:
    """Of positive values; ticks at 1, 2 and 5 of each decade, or at decades alone where there are many."""
    low, high = math.log10(min(values) / 1.25), math.log10(max(values) * 1.25)
    steps = _DECADES if high - low < 2 else (1,)
    found = [m * 10.0**e for e in range(math.floor(low), math.ceil(high) + 1) for m in steps]
    ticks = tuple((value, f"{value:g}") for value in found if low <= math.log10(value) <= high)
    return Scale(lambda value: start + (math.log10(value) - low) / (high - low) * (end - start), ticks, name)


def loss_scale(losses: Sequence[float], *, name: str, start: float, end: float) -> Scale:
    """Linear below a thousandth, logarithmic above: small losses and large ones are both seen. Gains count as none."""
    linear = 1e-3

    def bent(value: float) -> float:
        return math.asinh(max(value, 0.0) / linear)

    top = max(bent(max(losses, default=0.0)) * 1.08, bent(0.02))
    ticks = tuple((v, f"{100 * v:g}%") for v in (0, 1e-3, 1e-2, 1e-1, 1.0, 10.0) if bent(v) <= top)
    return Scale(lambda value: start + bent(value) / top * (end - start), ticks, name)


def scatter(title: str, points: Sequence[Point], x: Scale, y: Scale, *, front: Sequence[Point], says: str) -> str:
    """Points on two scales made for `across` and `upwards`; what of the front is better in one of the two is joined."""
    marks = "".join(
        _circle(point, x.place(point.x), y.place(point.y)) for point in sorted(points, key=lambda point: -point.size)
    )
    line = " ".join(f"{x.place(p.x):.1f},{y.place(p.y):.1f}" for p in _falling(front))
    joined = f'<polyline class="front" points="{line}"/>' if len(front) > 1 else ""
    inside = _axes(x, y) + joined + marks + _names([p for p in points if p.is_named], x, y)
    return figure(title, inside, width=_WIDTH, height=_HEIGHT, says=says)


def dots(title: str, rows: Sequence[Sequence[Point]], name: str, *, says: str) -> str:
    """Points in rows with names, on one logarithmic scale; only `x`, `size` and what a mark says are looked at."""
    left, high = _name_width([row[0].name for row in rows]), 20
    values = [point.x for row in rows for point in row]
    x = log_scale(values, name=name, start=left, end=_WIDTH - _RIGHT)
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
    label = f'<text class="axis" x="{(left + _WIDTH - _RIGHT) / 2:.1f}" y="{foot + 30}">{escape(name)}</text>'
    return figure(title, "".join(drawn) + label, width=_WIDTH, height=foot + 36, says=says)


def across() -> dict[str, float]:
    """Where a horizontal scale begins and ends."""
    return {"start": _LEFT, "end": _WIDTH - _RIGHT}


def upwards() -> dict[str, float]:
    return {"start": _HEIGHT - _BOTTOM, "end": _TOP}


def named_heatmap(
    title: str,
    names: Sequence[str],
    rows: Sequence[Sequence[float | None]],
    *,
    shown: Format,
    top: float,
    column: str,
    says: str,
) -> str:
    """Few rows with names, columns numbered from 0; where there is room the values are written into their cells."""
    left, right = _name_width(names), 6
    across = max(map(len, rows))
    size = (_WIDTH - left - right) / across
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
    return figure(title, "".join(cells) + ticks + label, width=_WIDTH, height=foot + 36, says=says)


def heatmap(
    title: str, matrix: Sequence[Sequence[float | None]], *, top: float, row: str, column: str, says: str
) -> str:
    """A large matrix in shades from 0 to `top`: one path a shade, so that thousands of cells stay small."""
    across, down = max(map(len, matrix)), len(matrix)
    wide = (_WIDTH - 34) / across
    high = wide if down > across / 3 else max(wide, min(18.0, 160 / down))
    shades: dict[int, list[str]] = {}
    for index, line in enumerate(matrix):
        for number, value in enumerate(line):
            if value is not None:
                shades.setdefault(_level(value, top), []).append(f"M{number} {index}h1v1h-1z")
    paths = "".join(f'<path class="s{level}" d="{"".join(drawn)}"/>' for level, drawn in sorted(shades.items()))
    grid = f'<g transform="translate(30 0) scale({wide:.4f} {high:.4f})">{paths}</g>'
    foot = down * high
    ticks = "".join(
        f'<text class="tick" x="{30 + (n + 0.5) * wide:.1f}" y="{foot + 13:.1f}">{n}</text>' for n in _few(across)
    ) + "".join(
        f'<text class="tick end" x="25" y="{(n + 0.5) * high + 4:.1f}">{n}</text>'
        for n in (range(down) if down <= 16 and high >= 12 else _few(down))
    )
    middle = foot / 2
    label = f'<text class="axis" x="{30 + across * wide / 2:.1f}" y="{foot + 28:.1f}">{escape(column)}</text>'
    label += f'<text class="axis" transform="translate(9 {middle:.1f}) rotate(-90)">{escape(row)}</text>'
    return figure(title, grid + ticks + label, width=_WIDTH, height=foot + 34, says=says)


def legend(most: str) -> str:
    """The shades of a heatmap, from 0 to `most`, as HTML."""
    steps = "".join(f'<i class="b{level}"></i>' for level in range(LEVELS))
    return f'<p class="legend"><span>0</span>{steps}<span>{most}</span></p>'


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of a bar chart: parts from the left, in classes `p0`, `p1`, ...; the text at its end; exact values."""

    name: str
    parts: tuple[float, ...]
    text: str
    values: tuple[object, ...]


def bars(title: str, rows: Sequence[Bar], *, top: float, says: str) -> str:
    """Horizontal bars from 0 to `top`."""
    left, right, high = _name_width([bar.name for bar in rows]), 7.0 * max(len(bar.text) for bar in rows) + 10, 20
    room = _WIDTH - left - right
    drawn = []
    for index, bar in enumerate(rows):
        upper, at = index * high, left
        drawn.append(f'<text class="name" x="{left - 6:g}" y="{upper + 14}">{escape(bar.name)}</text>')
        values = " ".join(map(exact, bar.values))
        drawn.append(f'<g data-values="{values}"><title>{escape(f"{bar.name}: {bar.text}")}</title>')
        for number, part in enumerate(bar.parts):
            wide = room * part / top
            drawn.append(f'<rect class="p{number}" x="{at:.1f}" y="{upper + 3}" width="{wide:.1f}" height="14"/>')
            at += wide
        drawn.append(f'<text class="value" x="{left + room + 6:.1f}" y="{upper + 14}">{escape(bar.text)}</text></g>')
    return figure(title, "".join(drawn), width=_WIDTH, height=len(rows) * high + 4, says=says)


def _falling(points: Sequence[Point]) -> list[Point]:
    """From left to right those that lie lower than all before."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, point.y)):
        if not found or point.y < found[-1].y:
            found.append(point)
    return found


def _circle(point: Point, across: float, upper: float) -> str:
    values = " ".join(map(exact, point.values))
    return (
        f'<circle class="{point.kind}" cx="{across:.1f}" cy="{upper:.1f}" r="{point.size:.1f}" '
        f'data-values="{values}"><title>{escape(point.title)}</title></circle>'
    )


def _name_width(names: Sequence[str]) -> float:
    return 7.2 * max(map(len, names)) + 10


def _names(points: Sequence[Point], x: Scale, y: Scale) -> str:
    """Beside their points, moved up or down where two would lie on each other, to the left where there is no room."""
    taken: list[tuple[float, float, float]] = []
    drawn = []
    for point in sorted(points, key=lambda point: (y.place(point.y), x.place(point.x))):
        wide = 6.8 * len(point.name)
        across = x.place(point.x)
        is_left = across + point.size + 5 + wide > _WIDTH
        begin = across - point.size - 5 - wide if is_left else across + point.size + 5
        upper = y.place(point.y) + 4
        free = next(
            shift
            for turn in range(40)
            for shift in (-13.0 * turn, 13.0 * turn)
            if _TOP <= upper + shift <= _HEIGHT - _BOTTOM + 4
            and all(abs(upper + shift - other) >= 12 or begin > b or begin + wide < a for other, a, b in taken)
        )
        taken.append((upper + free, begin, begin + wide))
        if free:
            near = begin + wide if is_left else begin
            ends = f'x1="{across:.1f}" y1="{upper - 4:.1f}" x2="{near:.1f}" y2="{upper + free - 4:.1f}"'
            drawn.append(f'<line class="lead" {ends}/>')
        drawn.append(f'<text class="mark" x="{begin:.1f}" y="{upper + free:.1f}">{escape(point.name)}</text>')
    return "".join(drawn)


def _axes(x: Scale, y: Scale) -> str:
    foot, end = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    lines = [
        f'<line class="grid" x1="{x.place(v):.1f}" x2="{x.place(v):.1f}" y1="{_TOP}" y2="{foot}"/>'
        f'<text class="tick" x="{x.place(v):.1f}" y="{foot + 15}">{text}</text>'
        for v, text in x.ticks
    ] + [
        f'<line class="grid" x1="{_LEFT}" x2="{end}" y1="{y.place(v):.1f}" y2="{y.place(v):.1f}"/>'
        f'<text class="tick end" x="{_LEFT - 6}" y="{y.place(v) + 4:.1f}">{text}</text>'
        for v, text in y.ticks
    ]
    middle = (_TOP + foot) / 2
    return (
        "".join(lines)
        + f'<text class="axis" x="{(_LEFT + end) / 2:.1f}" y="{_HEIGHT - 8}">{escape(x.name)}</text>'
        + f'<text class="axis" transform="translate(11 {middle:.1f}) rotate(-90)">{escape(y.name)}</text>'
    )


def _cell(
    value: float, top: float, x: float, y: float, wide: float, high: float, is_written: bool, shown: Format
) -> str:
    level = _level(value, top)
    written = (
        f'<text class="t{level}" x="{x + wide / 2:.1f}" y="{y + 14:g}">{escape(shown(value))}</text>'
        if is_written
        else ""
    )
    return (
        f'<g data-values="{exact(value)}"><title>{escape(shown(value))}</title><rect class="s{level}" x="{x:.1f}" '
        f'y="{y:g}" width="{wide - 1:.1f}" height="{high - 1:g}"/>{written}</g>'
    )


def _level(value: float, top: float) -> int:
    share = value / top if top > 0 else 0.0
    return min(LEVELS - 1, max(0, math.ceil(share * (LEVELS - 1))))


def _few(count: int) -> list[int]:
    """Some numbers below `count`, evenly spaced and round."""
    step = max(1, int(_round_step(count / 5)))
    return list(range(0, count, step))


def _round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least - 1e-12)
