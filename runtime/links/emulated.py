"""Links of given bandwidth and latency: on the wall clock a real experiment anywhere, on a virtual one for tests."""

from dataclasses import dataclass

import torch

from artifacts.shape import FULL_BITS, Shape
from runtime.links.clock import Clock, Timeline, VirtualClock, WallClock
from runtime.links.link import DEMAND, PREFETCH, Source, Transfer


@dataclass(eq=False, slots=True)
class _PacedTransfer(Transfer):
    """One that is there at a time that is known once it has started."""

    issued_s: float = 0.0
    lands_at_s: float = 0.0


class PacedLink:
    """A link of given bandwidth and latency on a clock: transfers land when they would, one after another.

    No thread: the queue is worked off when somebody asks, up to the present, and bytes are copied on collection. A
    thread that slept and woke beside the one that computes would take the interpreter from it at every turn.
    """

    kind = "paced"
    side_by_side = False

    def __init__(self, source: Source, shape: Shape, timeline: Timeline, clock: Clock) -> None:
        self._source, self._shape, self._timeline, self._clock = source, shape, timeline, clock
        self._queue: list[_PacedTransfer] = []  # not started, demand first
        self._num_demands = 0  # of the queue
        self._stall_s = 0.0

    def issue(self, key: int, slot: torch.Tensor, *, urgency: int, bits: int = FULL_BITS) -> _PacedTransfer:
        now_s = self._clock.now_s()
        self._advance(now_s)
        transfer = _PacedTransfer(key, slot, urgency, bits, issued_s=now_s)
        if not self._queue and self._timeline.free_at_s <= now_s:
            self._start(transfer)
        elif urgency == DEMAND:
            self._hurry(transfer)
        else:
            self._queue.append(transfer)
        return transfer

    def has_landed(self, transfer: _PacedTransfer) -> bool:
        now_s = self._clock.now_s()
        self._advance(now_s)
        return transfer.started and transfer.lands_at_s <= now_s

    def collect(self, transfer: _PacedTransfer) -> None:
        self._advance(self._clock.now_s())
        if not transfer.started and transfer.urgency == PREFETCH:
            self._queue.remove(transfer)
            transfer.urgency = DEMAND
            self._hurry(transfer)
        while not transfer.started:
            self._start_next()
        self._source.read(*divmod(transfer.key, self._shape.num_experts), transfer.slot, bits=transfer.bits)
        begin_s = self._clock.now_s()
        if transfer.lands_at_s > begin_s:
            self._clock.wait_until(transfer.lands_at_s)
            self._stall_s += self._clock.now_s() - begin_s

    def cancel(self, transfer: _PacedTransfer) -> None:
        self._advance(self._clock.now_s())
        if not transfer.started:
            self._num_demands -= transfer.urgency == DEMAND
            self._queue.remove(transfer)

    def drop(self) -> None:
        self._queue.clear()
        self._num_demands = 0

    def settle(self) -> None:
        """Slots are written on collection only."""

    def drain_stalls(self) -> float:
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    def conditions(self) -> dict[str, float | str]:
        line = self._timeline
        return {"kind": self.kind, "bandwidth_gbps": line.bandwidth / 1e9, "latency_us": line.latency_s * 1e6}

    def close(self) -> None:
        """Holds nothing."""

    def _advance(self, now_s: float) -> None:
        """Start every transfer that has begun by now."""
        while self._queue and self._timeline.free_at_s <= now_s:
            self._start_next()

    def _hurry(self, transfer: _PacedTransfer) -> None:
        """Before every prefetch, behind the demands."""
        self._queue.insert(self._num_demands, transfer)
        self._num_demands += 1

    def _start_next(self) -> None:
        transfer = self._queue.pop(0)
        self._num_demands -= transfer.urgency == DEMAND
        self._start(transfer)

    def _start(self, transfer: _PacedTransfer) -> None:
        transfer.started = True
        transfer.lands_at_s = self._timeline.reserve(transfer.issued_s, transfer.slot.nbytes)


class EmulatedLink(PacedLink):
    """A paced link between two parts of RAM, on the wall clock: a real experiment on any machine."""

    kind = "emulated"

    def __init__(self, source: Source, shape: Shape, *, bandwidth: float, latency_s: float = 0.0) -> None:
        super().__init__(source, shape, Timeline(bandwidth, latency_s), WallClock())


class VirtualLink(PacedLink):
    """A paced link on a clock that only moves when it is waited for or set, for tests."""

    kind = "virtual"

    def __init__(
        self, source: Source, shape: Shape, *, bandwidth: float, latency_s: float = 0.0, clock: VirtualClock
    ) -> None:
        super().__init__(source, shape, Timeline(bandwidth, latency_s), clock)
