"""What joins the slow tier and the fast tier: transfers are issued, then collected; demand overtakes queued
prefetches."""

import heapq
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import torch

from artifacts.shape import Shape
from runtime.clock import Timeline

DEMAND, PREFETCH = 0, 1
_SPIN_S = 200e-6  # sleep() overshoots by about 100 microseconds, so the last stretch before a deadline is spun


class Source(Protocol):
    """Where experts are read from, by any thread."""

    def read(self, layer: int, expert: int, out: torch.Tensor) -> None: ...


@dataclass(eq=False, slots=True)
class Transfer:
    """One expert on its way into one slot."""

    key: int
    slot: torch.Tensor  # [nbytes] uint8, in the fast tier
    urgency: int
    started: bool = False
    landed: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Link(Protocol):
    """`kind` and `conditions` go into the receipt."""

    kind: str

    def issue(self, key: int, slot: torch.Tensor, *, urgency: int) -> Transfer:
        """Queue a transfer. Returns at once."""

    def collect(self, transfer: Transfer) -> None:
        """Let compute have what `transfer` brings, waiting as long as it must. Raises what the transfer raised."""

    def cancel(self, transfer: Transfer) -> None:
        """Take a transfer off the queue, or see it through where it has begun; afterwards its slot may be written
        again."""

    def computed(self, slot: torch.Tensor) -> None:
        """Compute no longer reads `slot` beyond what was queued so far."""

    def drain_stalls(self) -> float:
        """Seconds for which compute stood still for this link since the last call."""

    def conditions(self) -> dict[str, float | str]: ...

    def close(self) -> None: ...


def wait_until(deadline_s: float) -> None:
    """Return at `deadline_s` of `time.perf_counter`, as exactly as the machine lets us."""
    remaining = deadline_s - time.perf_counter()
    if remaining > _SPIN_S:
        time.sleep(remaining - _SPIN_S)
    while time.perf_counter() < deadline_s:
        pass


class ThreadLink:
    """A link whose transfers run one after another on a thread of its own. Subclasses say how one expert is moved."""

    kind = "thread"

    def __init__(self, source: Source, shape: Shape) -> None:
        self._source, self._shape = source, shape
        self._queue: list[tuple[int, int, Transfer]] = []
        self._order = count()
        self._wake = threading.Condition()
        self._closed = False
        self._stall_s = 0.0
        self._thread = threading.Thread(target=self._serve, name=f"moectl-{self.kind}-link", daemon=True)
        self._thread.start()

    def issue(self, key: int, slot: torch.Tensor, *, urgency: int) -> Transfer:
        transfer = Transfer(key, slot, urgency)
        with self._wake:
            heapq.heappush(self._queue, (urgency, next(self._order), transfer))
            self._wake.notify()
        return transfer

    def collect(self, transfer: Transfer) -> None:
        if not transfer.landed.is_set():
            begin_s = time.perf_counter()
            self._hurry(transfer)
            transfer.landed.wait()
            self._stall_s += time.perf_counter() - begin_s
        if transfer.error is not None:
            raise transfer.error

    def cancel(self, transfer: Transfer) -> None:
        with self._wake:
            if not transfer.started:
                self._queue = [entry for entry in self._queue if entry[2] is not transfer]
                heapq.heapify(self._queue)
                return
        transfer.landed.wait()

    def computed(self, slot: torch.Tensor) -> None:
        """Compute on a CPU is over when its call returns."""

    def drain_stalls(self) -> float:
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    def conditions(self) -> dict[str, float | str]:
        return {"kind": self.kind}

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._queue.clear()
            self._wake.notify()
        self._thread.join()

    def _hurry(self, transfer: Transfer) -> None:
        """A prefetch that compute waits for goes before every other prefetch."""
        with self._wake:
            if transfer.urgency == PREFETCH and not transfer.started:
                self._queue = [entry for entry in self._queue if entry[2] is not transfer]
                heapq.heapify(self._queue)
                transfer.urgency = DEMAND
                heapq.heappush(self._queue, (DEMAND, next(self._order), transfer))

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                transfer = heapq.heappop(self._queue)[2]
                transfer.started = True
            try:
                self._move(transfer)
            except BaseException as error:  # handed to whoever collects the transfer
                transfer.error = error
            transfer.landed.set()

    def _read(self, key: int, out: torch.Tensor) -> None:
        self._source.read(*divmod(key, self._shape.num_experts), out)

    def _move(self, transfer: Transfer) -> None:
        raise NotImplementedError


class DiskLink(ThreadLink):
    """Reads experts from the checkpoint as they are wanted; what the process holds is its slots."""

    kind = "disk"

    def _move(self, transfer: Transfer) -> None:
        self._read(transfer.key, transfer.slot)


class EmulatedLink(ThreadLink):
    """A link of given bandwidth and latency between two parts of RAM: every transfer takes its time on a paced
    timeline."""

    kind = "emulated"

    def __init__(self, source: Source, shape: Shape, *, bandwidth: float, latency_s: float = 0.0) -> None:
        self._timeline = Timeline(bandwidth, latency_s)
        super().__init__(source, shape)

    def _move(self, transfer: Transfer) -> None:
        lands_at_s = self._timeline.reserve(time.perf_counter(), self._shape.expert_nbytes)
        self._read(transfer.key, transfer.slot)
        wait_until(lands_at_s)

    def conditions(self) -> dict[str, float | str]:
        return {
            "kind": self.kind,
            "bandwidth_gbps": self._timeline.bandwidth / 1e9,
            "latency_us": self._timeline.latency_s * 1e6,
        }


class VirtualLink:
    """A link on virtual time, for tests and simulation: bytes move at once, seconds are counted on `now`."""

    kind = "virtual"

    def __init__(
        self, source: Source, shape: Shape, *, bandwidth: float, latency_s: float = 0.0, now: Callable[[], float]
    ) -> None:
        self._source, self._shape, self._now = source, shape, now
        self._timeline = Timeline(bandwidth, latency_s)
        self._lands_at_s: dict[Transfer, float] = {}
        self._stall_s = 0.0

    def issue(self, key: int, slot: torch.Tensor, *, urgency: int) -> Transfer:
        transfer = Transfer(key, slot, urgency)
        self._source.read(*divmod(key, self._shape.num_experts), slot)
        self._lands_at_s[transfer] = self._timeline.reserve(self._now(), self._shape.expert_nbytes)
        return transfer

    def collect(self, transfer: Transfer) -> None:
        self._stall_s += max(0.0, self._lands_at_s.pop(transfer) - self._now())

    def drain_stalls(self) -> float:
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    def cancel(self, transfer: Transfer) -> None:
        self._lands_at_s.pop(transfer, None)

    def computed(self, slot: torch.Tensor) -> None:
        """Nothing reads behind our back."""

    def conditions(self) -> dict[str, float | str]:
        return {"kind": self.kind, "bandwidth_gbps": self._timeline.bandwidth / 1e9}

    def close(self) -> None:
        """Holds nothing."""
