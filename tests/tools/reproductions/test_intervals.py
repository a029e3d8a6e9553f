"""Intervals by request: what is resampled, and when a figure counts as above or below zero."""

import numpy as np
import pytest

from tools.reproductions.intervals import RESAMPLINGS, Interval, resampled


def test_requests_are_resampled_whole_and_the_same_each_time() -> None:
    weights = resampled(5)
    assert weights.shape == (1 + RESAMPLINGS, 5) and weights[0].tolist() == [1] * 5
    assert (weights.sum(axis=1) == 5).all() and weights[1:].std() > 0.5
    assert np.array_equal(weights, resampled(5)) and not np.array_equal(
        weights, resampled(5, seed=1)
    )


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ([0.1, 0.3, 0.2, 0.2], True),
        ([-0.1, -0.3, -0.2, -0.2], False),
        ([0.9, -0.3, 0.3, -0.2], None),
        ([0.0] * 4, None),
    ],
)
def test_a_gain_counts_where_the_interval_excludes_zero(
    gains: list[float], verdict: bool | None
) -> None:
    weights = resampled(4)
    found = Interval.of(weights @ np.array(gains) / 4)
    assert found.is_positive is verdict
    assert found.value == pytest.approx(np.mean(gains)) and found.low <= found.value <= found.high


def test_an_interval_is_shown_in_per_cent() -> None:
    assert str(Interval(0.0604, -0.001, 0.12)) == "+6.0 % (-0.1 % to +12.0 %)"
