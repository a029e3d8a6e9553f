"""A link of given bandwidth and latency between two parts of RAM: a real experiment on any
machine."""

from dataclasses import dataclass

import torch

from artifacts.shape import FULL_BITS, Shape
from runtime.links.clock import Clock, Timeline, WallClock
from runtime.links.link import DEMAND, PREFETCH, ExpertSource, Link, Transfer


@dataclass(eq=False, slots=True)
class _TimedTransfer(Transfer):
    """A transfer that lands at a time which is known once it has started."""

    issued_s: float = 0.0
    lands_at_s: float = 0.0


class EmulatedLink(Link):
    """Transfers take their time on a timeline one after another, on the wall clock unless another
    is given.

    There is no thread: each call starts the queued transfers that would have begun by now, and
    bytes are copied on collection. A thread that slept and woke beside the computing one would take
    the interpreter from it every time.
    """

    kind = "emulated"
    is_concurrent = False

    def __init__(
        self,
        source: ExpertSource,
        shape: Shape,
        *,
        bandwidth: float,
        latency_s: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        self._source = source
        self._shape = shape
        self._timeline = Timeline(bandwidth, latency_s)
        self.clock: Clock = clock or WallClock()
        self._queue: list[_TimedTransfer] = []  # not started, demands first
        self._num_demands = 0  # in the queue
        self._stall_s = 0.0

    def issue(
        self, key: int, slot: torch.Tensor, *, urgency: int, bits: int = FULL_BITS
    ) -> _TimedTransfer:
        now_s = self.clock.now_s()
        self._advance(now_s)
        transfer = _TimedTransfer(key, slot, urgency, bits, issued_s=now_s)
        if not self._queue and self._timeline.free_at_s <= now_s:
            self._start(transfer)
        elif urgency == DEMAND:
            self._queue_demand(transfer)
        else:
            self._queue.append(transfer)
        return transfer

    def has_landed(self, transfer: _TimedTransfer) -> bool:
        now_s = self.clock.now_s()
        self._advance(now_s)
        return transfer.started and transfer.lands_at_s <= now_s

    def collect(self, transfer: _TimedTransfer) -> None:
        self._advance(self.clock.now_s())
        if not transfer.started and transfer.urgency == PREFETCH:
            self._queue.remove(transfer)
            transfer.urgency = DEMAND
            self._queue_demand(transfer)
        while not transfer.started:
            self._start_next()
        self._source.read(
            *divmod(transfer.key, self._shape.num_experts), transfer.slot, bits=transfer.bits
        )
        begin_s = self.clock.now_s()
        if transfer.lands_at_s > begin_s:
            self.clock.wait_until(transfer.lands_at_s)
            self._stall_s += self.clock.now_s() - begin_s

    def cancel(self, transfer: _TimedTransfer) -> None:
        self._advance(self.clock.now_s())
        if not transfer.started:
            self._num_demands -= transfer.urgency == DEMAND
            self._queue.remove(transfer)

    def clear(self) -> None:
        self._queue.clear()
        self._num_demands = 0

    def wait_for_copies(self) -> None:
        """Return at once: slots are written on collection only."""

    def drain_stalls(self) -> float:
        stall_s = self._stall_s
        self._stall_s = 0.0
        return stall_s

    def conditions(self) -> dict[str, float | str]:
        line = self._timeline
        return {
            "kind": self.kind,
            "bandwidth_gbps": line.bandwidth / 1e9,
            "latency_us": line.latency_s * 1e6,
        }

    def close(self) -> None:
        """There is nothing to free."""

    def _advance(self, now_s: float) -> None:
        """Start every transfer that would have begun by now."""
        while self._queue and self._timeline.free_at_s <= now_s:
            self._start_next()

    def _queue_demand(self, transfer: _TimedTransfer) -> None:
        """Queue before every prefetch and behind the other demands."""
        self._queue.insert(self._num_demands, transfer)
        self._num_demands += 1

    def _start_next(self) -> None:
        transfer = self._queue.pop(0)
        self._num_demands -= transfer.urgency == DEMAND
        self._start(transfer)

    def _start(self, transfer: _TimedTransfer) -> None:
        transfer.started = True
        transfer.lands_at_s = self._timeline.reserve(transfer.issued_s, transfer.slot.nbytes)
