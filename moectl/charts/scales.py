"""Parts of SVG charts: scales and shades, and templates that are filled to drawings. Colours come
from the classes in `charts.css`."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

LEVELS = 9  # shades of a heatmap
Spread = tuple[float, float] | None  # the ends of a bar of an error, where one is known
_DECADES = (1, 2, 5)


@dataclass(frozen=True, slots=True)
class Drawing:
    """The elements of a chart in a box of this size; `says` describes it in a sentence, for screen
    readers."""

    title: str
    inside: str
    width: float
    height: float
    says: str


@dataclass(frozen=True, slots=True)
class Frame:
    """The size of a chart with two axes, and its margins around the plotted area."""

    width: float = 380
    height: float = 290
    left: float = 56
    right: float = 14
    top: float = 16
    bottom: float = 42

    @property
    def across(self) -> dict[str, float]:
        """Start and end of a horizontal scale."""
        return {"start": self.left, "end": self.width - self.right}

    @property
    def upwards(self) -> dict[str, float]:
        """Start and end of a vertical scale."""
        return {"start": self.height - self.bottom, "end": self.top}


@dataclass(frozen=True, slots=True)
class AxisScale:
    """Maps values to pixels. `ticks` are values with their text."""

    place: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]
    name: str


def linear_scale(
    high: float,
    *,
    name: str,
    start: float,
    end: float,
    shown: Callable[[float], str] = "{:g}".format,
) -> AxisScale:
    """Return a linear scale from 0 to `high`, with about five round ticks."""
    step = round_step(high / 5)
    ticks = tuple(
        (number * step, shown(number * step))
        for number in range(math.floor(high / step + 1e-9) + 1)
    )
    return AxisScale(lambda value: start + value / high * (end - start), ticks, name)


def log_scale(values: Sequence[float], *, name: str, start: float, end: float) -> AxisScale:
    """Return a logarithmic scale of positive values.

    Ticks stand at 1, 2 and 5 of each decade, or at decades alone where there are many. If values
    lie so close that fewer than three of those ticks are left, they stand at round steps.
    """
    low = math.log10(min(values) / 1.25)
    high = math.log10(max(values) * 1.25)
    steps = _DECADES if high - low < 2 else (1,)
    candidates = [m * 10.0**e for e in range(math.floor(low), math.ceil(high) + 1) for m in steps]
    if sum(low <= math.log10(value) <= high for value in candidates) < 3:
        step = round_step((10**high - 10**low) / 5)
        candidates = [step * number for number in range(1, math.floor(10**high / step) + 1)]
    ticks = tuple((value, f"{value:g}") for value in candidates if low <= math.log10(value) <= high)
    return AxisScale(
        lambda value: start + (math.log10(value) - low) / (high - low) * (end - start), ticks, name
    )


def draw(kind: str, title: str, says: str, width: float, height: float, **shown: object) -> Drawing:
    """Fill the template of this kind of chart."""
    text = template(kind).render(shown)
    return Drawing(title, "".join(map(str.strip, text.splitlines())), width, height, says)


def template(kind: str) -> Template:
    """Return the template of a kind of chart. Templates escape what they show."""
    return _ENVIRONMENT.get_template(f"{kind}.svg")


def spanned(places: Iterable[tuple[float, Spread]]) -> list[float]:
    """Return values and the ends of their bars of errors."""
    return [each for value, spread in places for each in (value, *(spread or ()))]


def shade_of(value: float, top: float) -> int:
    """The shade of a value: 0 for 0, the last for `top` and more."""
    share = value / top if top > 0 else 0.0
    return min(LEVELS - 1, max(0, math.ceil(share * (LEVELS - 1))))


def name_width(names: Sequence[str]) -> float:
    """Pixels that the longest name takes in front of a row."""
    return 7.6 * max(map(len, names)) + 10


def round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least - 1e-12)


def exact(value: object) -> str:
    """A value in full precision, as a query returns it."""
    return repr(value) if isinstance(value, float) else str(value)


_ENVIRONMENT = Environment(
    loader=PackageLoader("moectl.charts"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"exact": exact, "px": "{:.1f}".format}
