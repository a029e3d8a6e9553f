"""A clock for links without waiting."""

from dataclasses import dataclass


@dataclass(slots=True)
class VirtualClock:
    """Time that passes only when a caller waits, or sets it."""

    time_s: float = 0.0

    def now_s(self) -> float:
        return self.time_s

    def wait_until(self, deadline_s: float) -> None:
        self.time_s = max(self.time_s, deadline_s)
