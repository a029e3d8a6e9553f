"""What joins the slow tier and the fast tier: transfers are issued, then collected; demand overtakes queued
prefetches."""

import heapq
import threading
import time
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import torch

from artifacts.errors import OutOfResources
from artifacts.shape import FULL_BITS, Shape

DEMAND, PREFETCH = 0, 1
PATIENCE_S = 120.0  # without a single byte: a network that was gone for a minute is no reason to end a long run
_CLOSING_S = 10.0
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


class Link(Protocol):
    """`kind` and `conditions` go into the receipt; `side_by_side`: transfers share the way, so that those of a step are
    there at about the same time."""

    kind: str
    side_by_side: bool

    def issue(self, key: int, slot: torch.Tensor, *, urgency: int, bits: int = FULL_BITS) -> Transfer:
        """Queue a transfer of as many bytes as `slot` has. Returns at once; the slot is written after what compute has
        queued so far."""

    def has_landed(self, transfer: Transfer) -> bool:
        """Whether `collect` would return at once."""

    def collect(self, transfer: Transfer) -> None:
        """Let compute have what `transfer` brings. Raises what the transfer raised, OutOfResources if nothing comes."""

    def cancel(self, transfer: Transfer) -> None:
        """Take a transfer off the queue, or see it through if begun; then its slot may be written again."""

    def drop(self) -> None:
        """Take every transfer off the queue, at once: nobody is going to collect any. What has begun goes on."""

    def settle(self) -> None:
        """Return when nothing that had begun is still written to a slot. Raises OutOfResources if that does not end."""

    def drain_stalls(self) -> float:
        """Seconds for which compute stood still for this link since the last call."""

    def conditions(self) -> dict[str, float | str]: ...

    def close(self) -> None: ...


class ThreadLink:
    """A link whose transfers run on threads of its own. Subclasses say how many, and how one expert is moved.

    Demands go as they come, on all threads; a prefetch begins only when nothing else is under way, so that a demand
    finds at most one before it. One that failed before anybody wanted it is moved once more for who does. Subclasses
    also count: `copy_s` seconds of moving so far, in which `_copied_nbytes` came. Where nothing at all moves for
    `patience_s`, who waits is told.
    """

    kind = "thread"
    side_by_side = False
    num_threads = 1

    def __init__(self, source: Source, shape: Shape, *, patience_s: float = PATIENCE_S) -> None:
        self._source, self._shape, self._patience_s = source, shape, patience_s
        self._queue: list[tuple[int, int, ThreadTransfer]] = []
        self._order = count()
        self._wake = threading.Condition()
        self._closed, self._num_landed = False, 0
        self._running: set[ThreadTransfer] = set()
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
            self._await(transfer)
            self._stall_s += time.perf_counter() - begin_s
        if transfer.error is not None and transfer.urgency == PREFETCH:
            self._begin_again(transfer)
            self.collect(transfer)
        elif transfer.error is not None:
            raise transfer.error

    def cancel(self, transfer: ThreadTransfer) -> None:
        with self._wake:
            if not transfer.started:
                self._queue = [entry for entry in self._queue if entry[2] is not transfer]
                heapq.heapify(self._queue)
                return
        self._await(transfer)

    def drop(self) -> None:
        with self._wake:
            self._queue.clear()

    def settle(self) -> None:
        for transfer in self._begun_so_far():
            self._await(transfer)

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
        for transfer in left:  # a generation that was broken off may still wait for it, and would for ever
            transfer.error = RuntimeError(_CLOSED)
            transfer.landed.set()
        deadline_s = time.perf_counter() + _CLOSING_S
        for thread in self._threads:  # one that is stuck in a read keeps what it writes to alive, and ends by itself
            thread.join(max(0.0, deadline_s - time.perf_counter()))

    def _begun_so_far(self) -> list[ThreadTransfer]:
        with self._wake:
            return list(self._running)

    def _await(self, transfer: ThreadTransfer) -> None:
        """Return when it has landed; others that land meanwhile are a sign of life."""
        num_landed = self._num_landed
        while not transfer.landed.wait(self._patience_s):
            if self._num_landed == num_landed:
                layer, expert = divmod(transfer.key % self._shape.num_keys, self._shape.num_experts)
                raise OutOfResources(
                    f"nothing came over the {self.kind} link for {self._patience_s:g} s, not layer {layer}, expert "
                    f"{expert} either: see whether the disk still answers"
                )
            num_landed = self._num_landed

    def _hurry(self, transfer: ThreadTransfer) -> None:
        """A prefetch that compute waits for goes before every other prefetch."""
        with self._wake:
            if transfer.urgency == PREFETCH and not transfer.started and not self._closed:
                self._queue = [entry for entry in self._queue if entry[2] is not transfer]
                heapq.heapify(self._queue)
                transfer.urgency = DEMAND
                heapq.heappush(self._queue, (DEMAND, next(self._order), transfer))
                self._wake.notify()

    def _begin_again(self, transfer: ThreadTransfer) -> None:
        """As a demand, of which nothing is known yet; once the link is closed it stays as it is."""
        with self._wake:
            transfer.urgency = DEMAND
            if not self._closed:
                transfer.error, transfer.started, transfer.landed = None, False, threading.Event()
                heapq.heappush(self._queue, (DEMAND, next(self._order), transfer))
                self._wake.notify()

    def _serve(self) -> None:
        while self._serve_one():
            """A thread that waits holds no transfer: slots that are given up would stay in memory with it."""

    def _serve_one(self) -> bool:
        transfer = self._begun()
        if transfer is None:
            return False
        try:
            self._move(transfer)
        except BaseException as error:  # handed to whoever collects the transfer
            transfer.error = error
        with self._wake:
            self._running.remove(transfer)
            self._num_landed += 1
        transfer.landed.set()
        return True

    def _begun(self) -> ThreadTransfer | None:
        """The next transfer, begun; None once the link is closed."""
        with self._wake:
            while not self._closed and not self._may_begin():
                self._wake.wait()
            if self._closed:
                return None
            transfer = heapq.heappop(self._queue)[2]
            transfer.started = True
            self._running.add(transfer)
            return transfer

    def _may_begin(self) -> bool:
        return bool(self._queue) and (self._queue[0][0] == DEMAND or not self._running)

    def _read(self, transfer: ThreadTransfer, out: torch.Tensor) -> None:
        self._source.read(*divmod(transfer.key, self._shape.num_experts), out, bits=transfer.bits)

    def _move(self, transfer: ThreadTransfer) -> None:
        raise NotImplementedError
