"""Scales: enough ticks to read a value by, however close the values lie."""

import pytest

from moectl.charts.scales import log_scale


@pytest.mark.parametrize(
    "values", [(13.75, 25.7), (7, 9), (1, 1), (0.9, 4.1), (1e-4, 5e-3), (1, 5000)]
)
def test_a_logarithmic_scale_has_three_ticks_and_more(values: tuple[float, float]) -> None:
    scale = log_scale(values, name="time", start=0, end=100)
    assert len(scale.ticks) >= 3 and all(0 <= scale.place(value) <= 100 for value, _ in scale.ticks)
