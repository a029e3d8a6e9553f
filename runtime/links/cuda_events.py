"""Events of a GPU that are used again, and copy times that are measured with them: making an event
for every copy would take longer than recording it."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import torch


class EventPool:
    """Events with times. One may be given back while a stream still waits for it: the stream waits
    for the work that was recorded when the wait was queued."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def take(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)

    def give_back(self, *events: torch.cuda.Event) -> None:
        self._free += events


@dataclass(eq=False, slots=True)
class StreamPoint:
    """A point of a stream for which transfers wait. Its event goes back to `pool` with its last
    reference."""

    event: torch.cuda.Event
    pool: EventPool

    def __del__(self) -> None:
        self.pool.give_back(self.event)


@dataclass(eq=False, slots=True)
class Copy:
    """A copy, or some together, between two events on `stream`, the `number`th of all. Events go
    back to `pool` with the last reference to it: then nothing can ask for its end."""

    begun: torch.cuda.Event
    done: torch.cuda.Event
    stream: torch.cuda.Stream
    nbytes: int
    number: int
    pool: EventPool

    def __del__(self) -> None:
        self.pool.give_back(self.begun, self.done)


class CopyTimes:
    """The bytes of copies, and the seconds in which at least one was under way."""

    def __init__(self, pool: EventPool) -> None:
        self._pool = pool
        self._num_begun = 0
        self._unmeasured: deque[Copy] = deque()
        self._latest: Copy | None = None  # that ended last among measured copies

    def begin(self, stream: torch.cuda.Stream, nbytes: int) -> Copy:
        """Note a copy that is queued next on `stream`; `end` it afterwards."""
        self._num_begun += 1
        copy = Copy(
            self._pool.take(), self._pool.take(), stream, nbytes, self._num_begun, self._pool
        )
        copy.begun.record(stream)
        return copy

    def end(self, copy: Copy) -> None:
        copy.done.record(copy.stream)
        self._unmeasured.append(copy)

    def drain(self) -> tuple[float, int]:
        """Return the seconds and bytes of the copies that have ended since the last call."""
        seconds = 0.0
        nbytes = 0
        while self._unmeasured and self._unmeasured[0].done.query():
            copy = self._unmeasured.popleft()
            seconds += self._added_ms(copy) / 1e3
            nbytes += copy.nbytes
        return seconds, nbytes

    def _added_ms(self, copy: Copy) -> float:
        """Return a copy's time in milliseconds without the part it shares with earlier copies: one
        stream waits while the other copies."""
        duration = copy.begun.elapsed_time(copy.done)
        later = duration if self._latest is None else self._latest.done.elapsed_time(copy.done)
        if later > 0:
            self._latest = copy
        return max(0.0, min(duration, later))


def last_by_stream(copies: Collection[Copy]) -> Collection[Copy]:
    """Return the last of these copies on each stream, which is the one that ends last there."""
    if len(copies) == 1:
        return copies
    last: dict[torch.cuda.Stream, Copy] = {}
    for copy in copies:
        if copy.stream not in last or copy.number > last[copy.stream].number:
            last[copy.stream] = copy
    return last.values()
