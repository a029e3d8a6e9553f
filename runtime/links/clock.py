"""The clock and the timeline of an emulated link."""

import time
from dataclasses import dataclass
from typing import Protocol

_LATE_S = 1.5e-4


class Clock(Protocol):
    """Seconds from an arbitrary start."""

    def now_s(self) -> float: ...

    def wait_until(self, deadline_s: float) -> None:
        """Return at once if the deadline has passed."""


class WallClock:
    """Real time.

    A sleep ends up to 0.1 ms late, so the end of a wait is a loop that asks for the time. Each turn
    releases the interpreter, so that other threads can run.
    """

    def now_s(self) -> float:
        return time.perf_counter()

    def wait_until(self, deadline_s: float) -> None:
        while (remaining_s := deadline_s - time.perf_counter()) > 0:
            time.sleep(max(0.0, remaining_s - _LATE_S))


class ThreadClock:
    """Processor time of the calling thread, and on top of it the time that its waits would have
    taken: none of them sleeps.

    A machine that is busy with other programs delays the thread, and does not move this clock.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0

    def now_s(self) -> float:
        return time.thread_time() + self._waited_s

    def wait_until(self, deadline_s: float) -> None:
        self._waited_s += max(0.0, deadline_s - self.now_s())


@dataclass(slots=True)
class Timeline:
    """Transfers one at a time at `bandwidth` bytes per second, each after `latency_s` seconds of
    set-up."""

    bandwidth: float
    latency_s: float = 0.0
    free_at_s: float = 0.0

    def reserve(self, now_s: float, nbytes: int) -> float:
        """Queue a transfer of `nbytes` behind the others. Returns the time at which it ends."""
        start_s = max(now_s, self.free_at_s)
        self.free_at_s = start_s + self.latency_s + nbytes / self.bandwidth
        return self.free_at_s
