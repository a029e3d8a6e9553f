"""Measured claims: figures by seed or by resampled request, judged beside their null test.

A test is a function of the mean figure. Its tolerance is below the effect that it is to show, so
that it fails where the mechanism is off.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from tools.reproductions.intervals import Interval
from tools.reproductions.report import DOES_NOT_FOLLOW, Claim, Kind, Null

Test = Callable[[np.ndarray], bool]
Form = Callable[[np.ndarray], str]
SEEDS = (0, 1, 2)


def near(printed: float, within: float) -> Test:
    """Pass within this share of the printed figure."""
    return lambda ours: bool(abs(ours - printed) <= within * abs(printed))


def within_times(printed: float, times: float) -> Test:
    """Pass within this factor of the printed figure."""
    return lambda ours: bool(printed / times < ours < printed * times)


def above(least: float = 0.0) -> Test:
    """Pass above this figure."""
    return lambda ours: bool(ours > least)


def number(form: str, unit: str = "") -> Form:
    """Format a figure, or the ends of several."""

    def formed(ours: np.ndarray) -> str:
        ends = [format(end, form) for end in (float(np.min(ours)), float(np.max(ours)))]
        return " to ".join(dict.fromkeys(ends)) + unit

    return formed


_PLAIN = number(".3g")
_GAIN = number("+.1%")
_POSITIVE = above()


def by_seed(
    text: str,
    paper: str,
    ours: ArrayLike,
    *,
    off: str,
    null: ArrayLike,
    test: Test,
    form: Form = _PLAIN,
    over: str = "seeds",
) -> Claim:
    """Judge the mean of `ours` [seeds] or [seeds, n] over seeds, or other parts; `null` is the same
    with the mechanism `off`."""
    each = np.asarray(ours, float)
    mean = each.mean(axis=0)
    switched = np.mean(np.asarray(null, float), axis=0)
    passed = sum(bool(test(one)) for one in each)
    return Claim(
        text,
        paper,
        form(mean),
        bool(test(mean)),
        Kind.MEASURED,
        null=Null(off, form(switched), bool(test(switched))),
        spread=f"{', '.join(map(form, each))}; passes with {passed} of {len(each)} {over}",
    )


def by_request(
    text: str,
    paper: str,
    ours: np.ndarray,
    *,
    off: str,
    null: np.ndarray | float,
    test: Test = _POSITIVE,
    form: Form = _GAIN,
    is_gain: bool = True,
) -> Claim:
    """Judge a figure of a recorded trace [1 + RESAMPLINGS] by its value. Of a gain it cannot be
    said where the interval has zero in it and the test passes somewhere in it."""
    found = Interval.of(ours)
    switched = np.asarray(np.atleast_1d(null)[0])
    value, low, high = (np.asarray(one) for one in (found.value, found.low, found.high))
    passes = [bool(test(one)) for one in (value, low, high)]
    is_open = is_gain and found.is_positive is None and any(passes)
    return Claim(
        text,
        paper,
        form(value),
        None if is_open else passes[0],
        Kind.MEASURED,
        null=Null(off, form(switched), bool(test(switched))),
        spread=f"95 %: {form(low)} to {form(high)}",
    )


def derived(text: str, paper: str, ours: str, holds: bool) -> Claim:
    """A claim that printed numbers decide, or any routing."""
    return Claim(text, paper, ours, holds, Kind.DERIVED)


def ruled_out(text: str, paper: str, ours: str) -> Claim:
    """A claim that the paper's other numbers rule out; `ours` is the arithmetic."""
    return Claim(text, paper, ours, None, Kind.DERIVED, DOES_NOT_FOLLOW)


def left_out(text: str, paper: str, why: str, verdict: str) -> Claim:
    """A claim that is not judged, as it is not determined or not testable, and why."""
    return Claim(text, paper, why, None, Kind.LEFT_OUT, verdict)


def fitted(text: str, paper: str, ours: str, holds: bool) -> Claim:
    """A claim that a number fitted to the paper decides."""
    return Claim(text, paper, ours, holds, Kind.FITTED)
