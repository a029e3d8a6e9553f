"""Prefetches under way: which keys they bring, in order of issue, and when their bytes have gone by."""

from collections import deque
from collections.abc import Container
from dataclasses import dataclass


@dataclass(slots=True)
class _Arrival:
    """What the link still has to bring of a key, in logical bytes."""

    key: int
    remaining: int


class Arrivals:
    """`window`: bytes that go by per step, in this one `lent` besides. `queue` is empty when nothing is under way."""

    def __init__(self, window: int) -> None:
        self.window, self.lent = window, 0
        self.queue: deque[_Arrival] = deque()
        self._backlog = 0  # bytes still to come

    @property
    def room(self) -> int:
        """Bytes that go by in this step and that nothing is sent for yet; below 0 where more is under way."""
        return self.window + self.lent - self._backlog

    def send(self, key: int, nbytes: int) -> None:
        self.queue.append(_Arrival(key, nbytes))
        self._backlog += nbytes

    def drain(self) -> list[int]:
        """Let this step's bytes go by; returns the keys that are there now."""
        budget, landed = self.window + self.lent, []
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

    def under_way(self, keys: Container[int]) -> list[int]:
        """Those of `keys` that are still to come."""
        return [arrival.key for arrival in self.queue if arrival.key in keys]

    def latest(self) -> list[int]:
        """Keys, the last issued first."""
        return [arrival.key for arrival in reversed(self.queue)]

    def remove(self, keys: Container[int]) -> None:
        """Whatever these still had to bring is waited for, or comes no more."""
        self.queue = deque(arrival for arrival in self.queue if arrival.key not in keys)
        self._backlog = sum([arrival.remaining for arrival in self.queue])

    def validate(self) -> None:
        """Raise AssertionError unless what is to come is what is under way."""
        coming = sum([arrival.remaining for arrival in self.queue])
        assert coming == self._backlog, f"{coming} bytes are to come, and {self._backlog} are counted"

    def clear(self) -> None:
        """Nothing comes any more."""
        self.queue.clear()
        self._backlog = 0
