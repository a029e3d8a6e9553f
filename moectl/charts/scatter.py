"""A scatter plot whose every mark has its name beside it: no name lies on a mark, on another name
or past the edge."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moectl.charts.scales import AxisScale, Drawing, Frame, Spread, draw

# pixels: of a name's letter, of its height, of a mark
_LETTER = 6.9
_LINE = 15.0
_RADIUS = 5.0
_LEAST_LOSS = 1e-4  # at the top of a scale
_FOOT = 36.0  # pixels below the line of no loss
_KINDS = {"exact": "strong", "altered": "warm", "full": "ink"}

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True, slots=True)
class Mark:
    """A place and its name. `kind` is `exact`, `altered` (drawn as a diamond) or `full`; `across`
    and `upwards` are the ends of bars of its error. Unless `is_named`, only a pointer tells its
    name."""

    x: float
    y: float
    name: str
    kind: str
    across: Spread = None
    upwards: Spread = None
    is_named: bool = True


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
    """Marks on two scales made for `frame`, with their names. `note` stands above the plot, and
    `key` under it says what each kind stands for."""
    places = [(x.place(mark.x), y.place(mark.y)) for mark in marks]
    taken = [_around(across, upper) for across, upper in places]
    named = []
    for mark, (across, upper) in sorted(
        zip(marks, places, strict=True), key=lambda pair: (pair[1][1], pair[1][0])
    ):
        if not mark.is_named:
            continue
        box = _free_box(mark, across, upper, taken, frame)
        taken.append(box)
        named.append((mark, box, _end(across, upper, box)))
    own = {"marks": marks, "named": named, "x": x, "y": y, "frame": frame, "note": note}
    own |= {"key": key, "kinds": _KINDS, "radius": _RADIUS}
    return draw("scatter", title, says, frame.width, frame.height + 22, **own)


def error_bar(loss: float, error: float | None) -> Spread:
    """Return the ends of a bar of a loss; None where nothing is lost or the error is not known."""
    return (loss - error, loss + error) if loss and error is not None else None


def loss_scale(losses: Sequence[float], *, name: str, start: float, end: float) -> AxisScale:
    """Return an upward scale, linear up to a tenth of the largest loss, at most a hundredth, and
    logarithmic above, so that small and large losses are seen. Gains count as 0."""
    most = max(_LEAST_LOSS, *losses)
    bend = min(most / 10, 1e-2)

    def bent(value: float) -> float:
        return math.asinh(max(value, 0.0) / bend)

    top = bent(most * 1.3)
    steps = [m * 10.0**e for e in range(-6, 2) for m in (1, 3)]
    ticks = [0, *(value for value in steps if bend <= value <= most * 1.3)]
    start -= _FOOT  # room for names below the marks that lose nothing
    return AxisScale(
        lambda value: start + bent(value) / top * (end - start),
        tuple((value, f"{100 * value:g} %") for value in ticks),
        name,
    )


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


def _end(across: float, upper: float, box: Box) -> tuple[float, float] | None:
    """Return where a line from a mark meets its name; None where the name is beside it."""
    left, top, right, bottom = box
    near_x = min(max(across, left), right)
    near_y = min(max(upper, top), bottom)
    is_far = math.hypot(near_x - across, near_y - upper) > _RADIUS + 6
    return (near_x, near_y) if is_far else None
