"""Bootstrap intervals by request: how far a figure depends on which requests were replayed."""

from dataclasses import dataclass

import numpy as np

RESAMPLINGS = 1000


def resampled(num_requests: int, *, seed: int = 0) -> np.ndarray:
    """Return how often each request counts, [1 + RESAMPLINGS, R]: once each in the first row, then
    as drawn with replacement."""
    drawn = np.random.default_rng(seed).multinomial(
        num_requests, np.full(num_requests, 1 / num_requests), size=RESAMPLINGS
    )
    return np.vstack([np.ones((1, num_requests), np.int64), drawn])


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure, and between which figures 95 % of its resamplings are."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Interval":
        """The interval of a figure [1 + RESAMPLINGS], computed for each row of `resampled`."""
        low, high = np.percentile(values[1:], [2.5, 97.5])
        return cls(float(values[0]), float(low), float(high))

    @property
    def is_positive(self) -> bool | None:
        """True if the figure is above zero, False if below; None if the interval includes zero."""
        return None if self.low <= 0 <= self.high else self.low > 0

    def __str__(self) -> str:
        return f"{_percent(self.value)} ({_percent(self.low)} to {_percent(self.high)})"


def _percent(share: float) -> str:
    return f"{share:+.1%}".replace("%", " %")
