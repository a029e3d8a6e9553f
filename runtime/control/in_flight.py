"""Prefetches in flight: their keys in order of issue, and when their bytes have been moved."""

from collections import deque
from collections.abc import Container
from dataclasses import dataclass


@dataclass(slots=True)
class _Arrival:
    """The bytes of a key that the link still has to move."""

    key: int
    remaining: int


class Arrivals:
    """`window`: bytes that are moved per step; `lent`: further bytes of this step. `queue` is empty
    when nothing is in flight."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.lent = 0
        self.queue: deque[_Arrival] = deque()
        self._backlog = 0  # bytes still to be moved

    @property
    def room(self) -> int:
        """Bytes of this step that no transfer has claimed yet; negative when more than that is in
        flight."""
        return self.window + self.lent - self._backlog

    def send(self, key: int, nbytes: int) -> None:
        self.queue.append(_Arrival(key, nbytes))
        self._backlog += nbytes

    def drain(self) -> list[int]:
        """Move this step's bytes and return the keys that have arrived."""
        budget = self.window + self.lent
        landed = []
        while self.queue and budget > 0:
            arrival = self.queue[0]
            moved = min(budget, arrival.remaining)
            arrival.remaining -= moved
            budget -= moved
            self._backlog -= moved
            if not arrival.remaining:
                landed.append(arrival.key)
                self.queue.popleft()
        return landed

    def latest(self) -> list[int]:
        """Return the keys in flight, the last issued first."""
        return [arrival.key for arrival in reversed(self.queue)]

    def remove(self, keys: Container[int]) -> None:
        """Remove keys whose remaining bytes are waited for or cancelled."""
        self.queue = deque(arrival for arrival in self.queue if arrival.key not in keys)
        self._backlog = sum([arrival.remaining for arrival in self.queue])

    def validate(self) -> None:
        """Raise AssertionError unless the counted bytes are those in flight."""
        coming = sum([arrival.remaining for arrival in self.queue])
        assert coming == self._backlog, (
            f"{coming} bytes are to come, and {self._backlog} are counted"
        )

    def clear(self) -> None:
        """Cancel everything in flight."""
        self.queue.clear()
        self._backlog = 0
