"""What joins the slow tier and the fast tier: transfers are issued, then collected; demand overtakes queued
prefetches."""

import heapq
import threading
import time
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import torch

from artifacts.replicas import FULL_BITS
from artifacts.shape import Shape
from runtime.clock import Clock, Timeline, VirtualClock, WallClock

DEMAND, PREFETCH = 0, 1
_CLOSED = "the link is closed"


class Source(Protocol):
    """Where experts are read from, by any thread, at any of their precisions."""

    def read(self, layer: int, expert: int, out: torch.Tensor, *, bits: int) -> None: ...


@dataclass(eq=False, slots=True)
class Transfer:
    """One expert on its way into one slot."""

    key: int
    slot: torch.Tensor  # [nbytes] uint8, in the fast tier, as long as the replica that comes
    urgency: int
    bits: int = FULL_BITS
    started: bool = False


@dataclass(eq=False, slots=True)
class ThreadTransfer(Transfer):
    """One that a thread moves, and says when it is there or what went wrong."""

    landed: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


@dataclass(eq=False, slots=True)
class _PacedTransfer(Transfer):
    """One that is there at a time that is known once it has started."""

    issued_s: float = 0.0
    lands_at_s: float = 0.0


class Link(Protocol):
    """`kind` and `conditions` go into the receipt."""

    kind: str

    def issue(self, key: int, slot: torch.Tensor, *, urgency: int, bits: int = FULL_BITS) -> Transfer:
        """Queue a transfer of as many bytes as `slot` has. Returns at once; the slot is written after what compute has
        queued so far."""

    def has_landed(self, transfer: Transfer) -> bool:
        """Whether `collect` would return at once."""

    def collect(self, transfer: Transfer) -> None:
        """Let compute have what `transfer` brings, waiting as long as it must. Raises what the transfer raised."""

    def cancel(self, transfer: Transfer) -> None:
        """Take a transfer off the queue, or see it through if begun; then its slot may be written again."""

    def drain_stalls(self) -> float:
        """Seconds for which compute stood still for this link since the last call."""

    def conditions(self) -> dict[str, float | str]: ...

    def close(self) -> None: ...


class ThreadLink:
    """A link whose transfers run on threads of its own. Subclasses say how many, and how one expert is moved.

    Demands go as they come, on all threads; a prefetch begins only when nothing else is under way, so that a demand
    finds at most one before it. Subclasses also count: `copy_s` seconds of moving so far, in which `_copied_nbytes`
    came.
    """

    kind = "thread"
    num_threads = 1

    def __init__(self, source: Source, shape: Shape) -> None:
        self._source, self._shape = source, shape
        self._queue: list[tuple[int, int, ThreadTransfer]] = []
        self._order = count()
        self._wake = threading.Condition()
        self._closed, self._num_running = False, 0
        self._stall_s, self.copy_s, self._copied_nbytes = 0.0, 0.0, 0
        name = f"moectl-{self.kind}-link"
        self._threads = [threading.Thread(target=self._serve, name=name, daemon=True) for _ in range(self.num_threads)]
        for thread in self._threads:
            thread.start()

    def issue(self, key: int, slot: torch.Tensor, *, urgency: int, bits: int = FULL_BITS) -> ThreadTransfer:
        transfer = ThreadTransfer(key, slot, urgency, bits)
        with self._wake:
            if self._closed:
                raise RuntimeError(_CLOSED)
            heapq.heappush(self._queue, (urgency, next(self._order), transfer))
            self._wake.notify()
        return transfer

    def has_landed(self, transfer: ThreadTransfer) -> bool:
        return transfer.landed.is_set()

    def collect(self, transfer: ThreadTransfer) -> None:
        if not transfer.landed.is_set():
            begin_s = time.perf_counter()
            self._hurry(transfer)
            transfer.landed.wait()
            self._stall_s += time.perf_counter() - begin_s
        if transfer.error is not None:
            raise transfer.error

    def cancel(self, transfer: ThreadTransfer) -> None:
        with self._wake:
            if not transfer.started:
                self._queue = [entry for entry in self._queue if entry[2] is not transfer]
                heapq.heapify(self._queue)
                return
        transfer.landed.wait()

    def drain_stalls(self) -> float:
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    def conditions(self) -> dict[str, float | str]:
        measured = {"measured_gbps": self._copied_nbytes / self.copy_s / 1e9} if self.copy_s else {}
        return {"kind": self.kind} | measured

    def close(self) -> None:
        with self._wake:
            self._closed = True
            left = [entry[2] for entry in self._queue]
            self._queue.clear()
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()
        for transfer in left:  # a generation that was broken off may still wait for it, and would for ever
            transfer.error = RuntimeError(_CLOSED)
            transfer.landed.set()

    def _hurry(self, transfer: ThreadTransfer) -> None:
        """A prefetch that compute waits for goes before every other prefetch."""
        with self._wake:
            if transfer.urgency == PREFETCH and not transfer.started and not self._closed:
                self._queue = [entry for entry in self._queue if entry[2] is not transfer]
                heapq.heapify(self._queue)
                transfer.urgency = DEMAND
                heapq.heappush(self._queue, (DEMAND, next(self._order), transfer))
                self._wake.notify()

    def _serve(self) -> None:
        while (transfer := self._begun()) is not None:
            try:
                self._move(transfer)
            except BaseException as error:  # handed to whoever collects the transfer
                transfer.error = error
            with self._wake:
                self._num_running -= 1
            transfer.landed.set()

    def _begun(self) -> ThreadTransfer | None:
        """The next transfer, begun; None once the link is closed."""
        with self._wake:
            while not self._closed and not self._may_begin():
                self._wake.wait()
            if self._closed:
                return None
            transfer = heapq.heappop(self._queue)[2]
            transfer.started = True
            self._num_running += 1
            return transfer

    def _may_begin(self) -> bool:
        return bool(self._queue) and (self._queue[0][0] == DEMAND or not self._num_running)

    def _read(self, transfer: ThreadTransfer, out: torch.Tensor) -> None:
        self._source.read(*divmod(transfer.key, self._shape.num_experts), out, bits=transfer.bits)

    def _move(self, transfer: ThreadTransfer) -> None:
        raise NotImplementedError


class PacedLink:
    """A link of given bandwidth and latency on a clock: transfers land when they would, one after another.

    No thread: the queue is worked off when somebody asks, up to the present, and bytes are copied on collection. A
    thread that slept and woke beside the one that computes would take the interpreter from it at every turn.
    """

    kind = "paced"

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
