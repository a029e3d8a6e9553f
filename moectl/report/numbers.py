"""Numbers of a page in short form, and with their exact value beside it."""

from collections.abc import Callable

from markupsafe import Markup

from moectl.charts.scales import exact
from moectl.show.render import human_bytes

Format = Callable[[object], str]


def short(value: object) -> str:
    """Three significant digits, or an integer from 1000 on."""
    number = float(value)
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def percent(value: object) -> str:
    return f"{100 * float(value):.1f}\N{NARROW NO-BREAK SPACE}%"


def hundredths(value: object) -> str:
    return f"{100 * float(value):.0f}"


def ratio(value: object) -> str:
    return f"{float(value):.4f}"


def times(value: object) -> str:
    return f"{short(value)}\N{NARROW NO-BREAK SPACE}×"


def nbytes(value: object) -> str:
    return human_bytes(float(value)).replace(" ", "\N{NARROW NO-BREAK SPACE}")


def whole(value: object) -> str:
    return f"{int(value):,}"


def data(value: object, shown: Format = short) -> str:
    """Return a number in short form that carries its exact value; `unknown` for None."""
    if value is None:
        return "unknown"
    return Markup('<data value="{}">{}</data>').format(exact(value), shown(value))
