"""A link's timeline: when a transfer would land, given when it was asked for. Pure arithmetic, on any clock."""

from dataclasses import dataclass


@dataclass(slots=True)
class Timeline:
    """One transfer at a time over `bandwidth` bytes per second, each after `latency_s` seconds of set-up."""

    bandwidth: float
    latency_s: float = 0.0
    free_at_s: float = 0.0

    def reserve(self, now_s: float, nbytes: int) -> float:
        """Queue a transfer behind what is under way; returns the time at which it lands."""
        start = max(now_s, self.free_at_s)
        self.free_at_s = start + self.latency_s + nbytes / self.bandwidth
        return self.free_at_s
