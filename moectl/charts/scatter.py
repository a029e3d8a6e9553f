"""A scatter plot whose every mark has its name beside it: no name lies on a mark, on another name
or past the edge."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from moectl.charts.scales import AxisScale, Drawing, Frame, axes, exact

# pixels: of a name's letter, of its height, of a mark
_LETTER = 6.9
_LINE = 15.0
_RADIUS = 5.0
_FOOT = 36.0  # pixels below the line of no loss
_KINDS = {"exact": "strong", "altered": "warm", "full": "ink"}

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True, slots=True)
class Mark:
    """A place and its name. `kind` is `exact`, `altered` (drawn as a diamond) or `full`."""

    x: float
    y: float
    name: str
    kind: str


def scatter(
    title: str,
    marks: Sequence[Mark],
    x: AxisScale,
    y: AxisScale,
    frame: Frame,
    *,
    says: str,
    note: str,
    key: dict[str, str],
) -> Drawing:
    """Marks on two scales made for `frame`, each with its name. `note` stands above the plot, and
    `key` under it says what each kind stands for."""
    places = [(x.place(mark.x), y.place(mark.y)) for mark in marks]
    taken = [_around(across, upper) for across, upper in places]
    drawn = [axes(x, y, frame), f'<text class="tick value" x="0" y="6">{escape(note)}</text>']
    for mark, (across, upper) in sorted(
        zip(marks, places, strict=True), key=lambda pair: (pair[1][1], pair[1][0])
    ):
        box = _free_box(mark, across, upper, taken, frame)
        taken.append(box)
        drawn.append(_named(mark, across, upper, box))
    drawn += [
        _symbol(mark, across, upper) for mark, (across, upper) in zip(marks, places, strict=True)
    ]
    return Drawing(title, "".join(drawn) + _key(key, frame), frame.width, frame.height + 22, says)


def loss_scale(losses: Sequence[float], *, name: str, start: float, end: float) -> AxisScale:
    """Return an upward scale, linear below a hundredth and logarithmic above, so that small and
    large losses are seen. Gains count as 0."""

    def bent(value: float) -> float:
        return math.asinh(max(value, 0.0) / 1e-2)

    top = bent(max(0.02, *losses) * 1.3)
    ticks = tuple(
        (v, f"{100 * v:g} %") for v in (0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0) if bent(v) <= top
    )
    start -= _FOOT  # room for names below the marks that lose nothing
    return AxisScale(lambda value: start + bent(value) / top * (end - start), ticks, name)


def _free_box(mark: Mark, across: float, upper: float, taken: Sequence[Box], frame: Frame) -> Box:
    """Return the place nearest to a mark where its name touches nothing, for exact ones preferably
    below it; the mark itself if the plot is full of names."""
    wide = _LETTER * len(mark.name)
    lefts = np.arange(frame.left, frame.width - wide, 4.0)
    middles = np.arange(frame.top + 4, frame.height - frame.bottom - _LINE / 2, 4.0)
    beside, left, middle = across + _RADIUS + 5, *np.meshgrid(lefts, middles)
    aside = np.maximum(np.maximum(left - across, across - left - wide), 0)
    far = np.hypot(aside, middle - upper) + (np.abs(left - beside) + np.abs(middle - upper)) / 100
    if mark.kind != "altered":
        far += np.where(middle < upper, _LINE, 0)
    places = [(beside, upper)] if beside + wide <= frame.width else []
    order = np.argsort(far, axis=None, kind="stable")
    places += zip(left.flat[order].tolist(), middle.flat[order].tolist(), strict=True)
    boxes = ((x, y - _LINE / 2, x + wide, y + _LINE / 2) for x, y in places)
    lowest = frame.height - frame.bottom
    free = (
        box for box in boxes if box[3] <= lowest and not any(_touch(box, other) for other in taken)
    )
    return next(free, (across, upper, across, upper))


def _touch(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _around(across: float, upper: float) -> Box:
    reach = _RADIUS + 2
    return across - reach, upper - reach, across + reach, upper + reach


def _named(mark: Mark, across: float, upper: float, box: Box) -> str:
    """The name, with a line to its mark where it is not beside it."""
    left, top, right, bottom = box
    text = f'<text class="mark" x="{left:.1f}" y="{bottom - 4:.1f}">{escape(mark.name)}</text>'
    near_x = min(max(across, left), right)
    near_y = min(max(upper, top), bottom)
    if math.hypot(near_x - across, near_y - upper) <= _RADIUS + 6:
        return text
    ends = f'x1="{across:.1f}" y1="{upper:.1f}" x2="{near_x:.1f}" y2="{near_y:.1f}"'
    return f'<g class="quiet"><line class="line" style="stroke-width:1" {ends}/></g>{text}'


def _symbol(mark: Mark, across: float, upper: float) -> str:
    values = f"{exact(mark.x)} {exact(mark.y)}"
    shape = _shape(mark.kind, across, upper)
    return (
        f'<g class="{_KINDS[mark.kind]}" '
        f'data-values="{values}"><title>{escape(mark.name)}</title>{shape}</g>'
    )


def _shape(kind: str, across: float, upper: float) -> str:
    if kind == "altered":
        reach = _RADIUS + 1
        around = f"l{reach} {reach}l-{reach} {reach}l-{reach} -{reach}z"
        return f'<path class="dot" d="M{across:.1f} {upper - reach:.1f}{around}"/>'
    return f'<circle class="dot" cx="{across:.1f}" cy="{upper:.1f}" r="{_RADIUS}"/>'


def _key(key: dict[str, str], frame: Frame) -> str:
    drawn = []
    at = 0.0
    upper = frame.height + 10
    for kind, words in key.items():
        drawn.append(f'<g class="{_KINDS[kind]}">{_shape(kind, at + _RADIUS, upper)}</g>')
        drawn.append(
            f'<text class="value" x="{at + 16:.1f}" y="{upper + 4:g}">{escape(words)}</text>'
        )
        at += 34 + 6.6 * len(words)
    return "".join(drawn)
