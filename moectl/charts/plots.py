"""Charts of lines, bars, rows of points and heatmaps, as drawings; marks carry the values they
stand for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from moectl.charts.scales import (
    LEVELS,
    AxisScale,
    Drawing,
    Frame,
    Spread,
    draw,
    log_scale,
    name_width,
    round_step,
    shade_of,
    spanned,
)

WIDTH = 380  # of a chart on a page
_ROW = 20  # pixels of a named row
_WIDE = 26  # pixels of a cell that has room for its value


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
    return draw("lines", title, says, frame.width, frame.height, drawn=drawn, x=x, y=y, frame=frame)


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
    room = WIDTH - left - 7.0 * max(len(bar.text) for bar in rows) - 10
    own = {"rows": rows, "left": left, "room": room, "top": top, "row_height": _ROW}
    return draw("bars", title, says, WIDTH, len(rows) * _ROW + 4, **own)


@dataclass(frozen=True, slots=True)
class Point:
    """A mark in a row: its place, size and name, its tooltip `title`, and the exact values behind
    it. `kind` is the class of its colour, `spread` the ends of a bar of its error."""

    x: float
    size: float
    name: str
    title: str
    values: tuple[object, ...]
    kind: str
    spread: Spread = None


def dots(title: str, rows: Sequence[Sequence[Point]], name: str, *, says: str) -> Drawing:
    """Rows of points, each row with its name, on one logarithmic scale."""
    left = name_width([row[0].name for row in rows])
    end = WIDTH - 14
    x = log_scale(
        spanned((each.x, each.spread) for row in rows for each in row),
        name=name,
        start=left,
        end=end,
    )
    ticks = [(x.place(value), text) for value, text in x.ticks]
    own = {
        "rows": rows,
        "left": left,
        "x": x,
        "ticks": ticks,
        "middle": (left + end) / 2,
        "row_height": _ROW,
    }
    return draw("dots", title, says, WIDTH, len(rows) * _ROW + 34, **own)


def heatmap(
    title: str,
    matrix: Sequence[Sequence[float | None]],
    *,
    top: float,
    row: str,
    column: str,
    says: str,
    width: float = WIDTH,
    names: Sequence[str] = (),
    shown: Callable[[float], str] | None = None,
    most: str = "",
) -> Drawing:
    """A matrix in shades from 0 to `top`: one path a shade, so that thousands of cells stay small.

    Rows have numbers, or `names`: then cells wide enough carry their value as text. On a page each
    cell tells its value as `shown`. The shades stand below up to `most`, if that is given.
    """
    across = max(map(len, matrix))
    down = len(matrix)
    left = name_width(names) if names else 30
    wide = (width - left - 4) / across
    high = min(wide, width / down) if down > across / 3 else max(wide, min(18.0, 160 / down))
    high = _ROW if names else high
    shades = [[_shade(value, top) for value in line] for line in matrix]
    own = {
        "across": across,
        "down": down,
        "left": left,
        "wide": wide,
        "high": high,
        "paths": _paths(shades),
        "shades": shades,
        "texts": shown
        and [["" if value is None else shown(value) for value in line] for line in matrix],
        "is_told": names and wide >= _WIDE,
        "row": row,
        "column": column,
        "ticks": [(left + (number + 0.5) * wide, str(number)) for number in _few(across)],
        "names": names,
        "numbers": range(down) if down <= 16 and high >= 12 else _few(down),
        "levels": LEVELS,
        "most": most,
    }
    return draw("heatmap", title, says, width, down * high + (52 if most else 34), **own)


def _shade(value: float | None, top: float) -> int | None:
    return None if value is None else shade_of(value, top)


def _paths(shades: Sequence[Sequence[int | None]]) -> list[tuple[int, str]]:
    """One path a shade; neighbours of one shade in a row are one rectangle. Cells that are None
    stay empty."""
    paths: dict[int, list[str]] = {}
    for index, line in enumerate(shades):
        number = 0
        for shade, same in groupby(line):
            count = len(list(same))
            if shade is not None:
                paths.setdefault(shade, []).append(f"M{number} {index}h{count}v1h-{count}z")
            number += count
    return [(shade, "".join(drawn)) for shade, drawn in sorted(paths.items())]


def _few(count: int) -> list[int]:
    """Some numbers below `count`, evenly spaced and round."""
    step = max(1, int(round_step(count / 5)))
    return list(range(0, count, step))
