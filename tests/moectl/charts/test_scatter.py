"""A scatter plot: no name lies on a mark, on another name or past the edge."""

import re
from itertools import combinations

import numpy as np
import pytest

from moectl.charts.scales import Frame, linear_scale
from moectl.charts.scatter import Mark, loss_scale, scatter

FRAME = Frame(width=520, height=310, top=28)
Box = tuple[float, float, float, float]


def boxes(inside: str) -> list[Box]:
    """Of the names, at 6.9 pixels a letter."""
    found = re.findall(r'class="mark" x="([\d.-]+)" y="([\d.-]+)">([^<]+)<', inside)
    return [
        (float(x), float(y) - 11, float(x) + 6.9 * len(name), float(y) + 4) for x, y, name in found
    ]


def touch(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@pytest.mark.parametrize("seed", range(8))
def test_names_touch_nothing(seed: int) -> None:
    """Half of the marks lie on the axis, many in one place, as exact presets do."""
    rng = np.random.default_rng(seed)
    loss = [0.0] * 9 + rng.uniform(0, 0.4, 9).tolist()
    times = rng.uniform(1, 1.5 if seed % 2 else 5, 18)
    x = linear_scale(5.5, name="time", **FRAME.across)
    y = loss_scale(loss, name="loss", **FRAME.upwards)
    marks = [
        Mark(time, lost, f"preset-{number}" * (1 + number % 2), "altered" if lost else "exact")
        for number, (time, lost) in enumerate(zip(times.tolist(), loss, strict=True))
    ]
    inside = scatter("T", marks, x, y, FRAME, says="T", note="N", key={"exact": "same"}).inside
    names = boxes(inside)
    places = [(x.place(mark.x), y.place(mark.y)) for mark in marks]
    assert len(names) == len(marks)
    assert not any(touch(one, other) for one, other in combinations(names, 2))
    assert not any(touch(name, (a - 5, b - 5, a + 5, b + 5)) for name in names for a, b in places)
    assert all(left >= FRAME.left and right <= FRAME.width for left, _, right, _ in names)


def test_losses_are_told_apart_small_and_large() -> None:
    scale = loss_scale([0.003, 0.9], name="loss", start=300.0, end=0.0)
    at = [scale.place(loss) for loss in (-0.1, 0.0, 0.003, 0.1, 0.9)]
    assert at[0] == at[1] < 300 and at == sorted(at, reverse=True) and at[1] - at[2] > 8
