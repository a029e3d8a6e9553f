"""The link between the slow tier and the fast tier: transfers are issued, then collected; demands
overtake queued prefetches. From disk several reads are under way, so that the device always has a
next one."""

import heapq
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol

import torch

from artifacts.errors import OutOfResources
from artifacts.shape import FULL_BITS, Shape
from runtime.model.layout import ExpertStore

DEMAND = 0
PREFETCH = 1
PATIENCE_S = 120.0  # without a single byte: a network failure of a minute should not end a long run
_CLOSING_S = 10.0
# docs/lab/disk.md: with one the device idles while bytes are copied; more than four gain little
READS_IN_FLIGHT = 4
READS_PAST_CACHE = 8  # past the page cache a thread only waits, and copies next to nothing
# up to here a copy from the page cache takes less time than a thread switch and back
_AT_ONCE_NBYTES = 1 << 20
_CLOSED = "the link is closed"
LANDED = threading.Event()
"""The event of transfers that need no waiting for a thread."""
LANDED.set()


class ExpertSource(Protocol):
    """Reads experts on any thread, at any of their precisions."""

    def read(self, layer: int, expert: int, out: torch.Tensor, *, bits: int) -> None: ...


@dataclass(eq=False, slots=True)
class Transfer:
    """One expert on its way into one slot."""

    key: int
    slot: torch.Tensor  # [nbytes] uint8 in the fast tier, the size of the replica
    urgency: int
    bits: int = FULL_BITS
    started: bool = False


class Wanted(NamedTuple):
    """Request for a load of one expert into one slot; the fields are as in `Transfer`."""

    key: int
    slot: torch.Tensor
    bits: int = FULL_BITS


@dataclass(eq=False, slots=True)
class ThreadTransfer(Transfer):
    """A transfer that a thread moves. The thread sets `landed` at its end, and `error` if it
    failed."""

    landed: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Link(Protocol):
    """Link between the slow tier and the fast tier. `kind` and `conditions` go into the receipt.
    `is_concurrent`: transfers share the bandwidth, so that those of one step land at about the same
    time. `is_queued`: a device waits for transfers that are collected, and the host does not.
    `takes_flags`: kernels can wait for copies (`runtime.links.cuda_flags`)."""

    kind: str
    is_concurrent: bool
    is_queued: bool = False
    takes_flags: bool = False

    def issue(
        self, key: int, slot: torch.Tensor, *, urgency: int, bits: int = FULL_BITS
    ) -> Transfer:
        """Queue a transfer of as many bytes as `slot` has. Returns at once. The slot is written
        after all compute that has been queued so far."""

    def issue_all(self, loads: Iterable[Wanted], *, urgency: int) -> list[Transfer]:
        """Issue the loads of one step, each as by `issue`."""
        return [self.issue(load.key, load.slot, urgency=urgency, bits=load.bits) for load in loads]

    def has_landed(self, transfer: Transfer) -> bool:
        """Return whether `collect` would return at once."""

    def collect(self, transfer: Transfer) -> None:
        """Wait until compute may read the slot. Raises the error of the transfer, OutOfResources if
        nothing arrives."""

    def collect_all(self, transfers: Sequence[Transfer]) -> None:
        """Collect all transfers that compute needs next, each as by `collect`."""
        for transfer in transfers:
            self.collect(transfer)

    def cancel(self, transfer: Transfer) -> None:
        """Remove a transfer from the queue, or wait for its end if it has begun. Its slot may then
        be written again."""

    def clear(self) -> None:
        """Remove every transfer from the queue without waiting; none of them may be collected.
        Transfers that have begun continue."""

    def wait_for_copies(self) -> None:
        """Wait until no transfer that had begun still writes to a slot. Raises OutOfResources if
        one does not end."""

    def drain_stalls(self) -> float:
        """Return the seconds for which compute waited for this link since the last call."""

    def conditions(self) -> dict[str, float | str]: ...

    def close(self) -> None: ...


class ThreadLink(Link):
    """A link whose transfers run on its own threads. Subclasses set the number of threads and move
    an expert.

    Demands begin in order of issue, on all threads. A prefetch begins only when no other transfer
    is under way, so that at most one delays a demand. A prefetch that failed is moved once more
    when it is collected. Subclasses also count the seconds of moving so far, `copy_s`, and the
    bytes moved in them, `_copied_nbytes`. A caller that waits gets OutOfResources when nothing at
    all has moved for `patience_s`.
    """

    kind = "thread"
    is_concurrent = False
    num_threads = 1

    def __init__(
        self, source: ExpertSource, shape: Shape, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._source = source
        self._shape = shape
        self._patience_s = patience_s
        self._queue: list[tuple[int, int, ThreadTransfer]] = []
        self._order = count()
        self._wake = threading.Condition()
        self._closed = False
        self._num_landed = 0
        self._running: set[ThreadTransfer] = set()
        self._stall_s = 0.0
        self.copy_s = 0.0
        self._copied_nbytes = 0
        name = f"moectl-{self.kind}-link"
        self._threads = [
            threading.Thread(target=self._serve, name=name, daemon=True)
            for _ in range(self.num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def issue(
        self, key: int, slot: torch.Tensor, *, urgency: int, bits: int = FULL_BITS
    ) -> ThreadTransfer:
        transfer = ThreadTransfer(key, slot, urgency, bits)
        self._enqueue(transfer)
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
            ThreadLink.collect(self, transfer)
        elif transfer.error is not None:
            raise transfer.error

    def cancel(self, transfer: ThreadTransfer) -> None:
        with self._wake:
            if not transfer.started:
                self._unqueue(transfer)
                return
        self._await(transfer)

    def clear(self) -> None:
        with self._wake:
            self._queue.clear()

    def wait_for_copies(self) -> None:
        with self._wake:
            running = list(self._running)
        for transfer in running:
            self._await(transfer)

    def drain_stalls(self) -> float:
        stall_s = self._stall_s
        self._stall_s = 0.0
        return stall_s

    def conditions(self) -> dict[str, float | str]:
        measured = {"measured_gbps": self._copied_nbytes / self.copy_s / 1e9} if self.copy_s else {}
        return {"kind": self.kind} | measured

    def close(self) -> None:
        with self._wake:
            self._closed = True
            unfinished = [entry[2] for entry in self._queue]
            self._queue.clear()
            self._wake.notify_all()
        # an interrupted generation may still wait for one, and would wait for ever
        for transfer in unfinished:
            transfer.error = RuntimeError(_CLOSED)
            transfer.landed.set()
        deadline_s = time.perf_counter() + _CLOSING_S
        # a thread that is stuck in a read keeps its slot in memory until the read ends
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.perf_counter()))

    def _enqueue(self, *transfers: ThreadTransfer) -> None:
        with self._wake:
            if self._closed:
                raise RuntimeError(_CLOSED)
            for transfer in transfers:
                self._push(transfer)

    def _push(self, transfer: ThreadTransfer) -> None:
        heapq.heappush(self._queue, (transfer.urgency, next(self._order), transfer))
        self._wake.notify()

    def _unqueue(self, transfer: ThreadTransfer) -> None:
        self._queue = [entry for entry in self._queue if entry[2] is not transfer]
        heapq.heapify(self._queue)

    def _await(self, transfer: ThreadTransfer) -> None:
        """Wait until the transfer has landed. The patience begins anew whenever another one lands.
        Raises OutOfResources once it has run out."""
        num_landed = self._num_landed
        while not transfer.landed.wait(self._patience_s):
            if self._num_landed == num_landed:
                layer, expert = divmod(transfer.key % self._shape.num_keys, self._shape.num_experts)
                raise OutOfResources(
                    f"nothing came over the {self.kind} link for {self._patience_s:g} s, not "
                    f"layer {layer}, expert {expert} either: see whether the disk still answers"
                )
            num_landed = self._num_landed

    def _hurry(self, transfer: ThreadTransfer) -> None:
        """Turn a queued prefetch that compute waits for into a demand."""
        with self._wake:
            if transfer.urgency == PREFETCH and not transfer.started and not self._closed:
                self._unqueue(transfer)
                transfer.urgency = DEMAND
                self._push(transfer)

    def _begin_again(self, transfer: ThreadTransfer) -> None:
        """Queue a failed transfer again as a demand, unless the link is closed."""
        with self._wake:
            transfer.urgency = DEMAND
            if not self._closed:
                transfer.error = None
                transfer.started = False
                transfer.landed = threading.Event()
                self._push(transfer)

    @torch.inference_mode()  # a slot that was made in it takes no other copies
    def _serve(self) -> None:
        while self._serve_one():
            """A waiting thread holds no transfer, which would keep a released slot in memory."""

    def _serve_one(self) -> bool:
        transfer = self._next_begun()
        if transfer is None:
            return False
        try:
            self._move(transfer)
        except BaseException as error:  # raised again by `collect`
            transfer.error = error
        with self._wake:
            self._running.remove(transfer)
            self._num_landed += 1
        transfer.landed.set()
        return True

    def _next_begun(self) -> ThreadTransfer | None:
        """Wait for the next transfer and begin it; None once the link is closed."""
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


class DiskLink(ThreadLink):
    """Reads experts from the checkpoint when they are wanted. `is_direct` says that its source
    bypasses the page cache.

    Small demands that the stores `kept`, by bits, have in the page cache are copied at once, on the
    caller's thread. The measured bandwidth is bytes over the seconds in which at least one read was
    under way.
    """

    kind = "disk"

    def __init__(
        self,
        source: ExpertSource,
        shape: Shape,
        *,
        kept: Mapping[int, ExpertStore] | None = None,
        is_direct: bool = False,
        num_threads: int | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.num_threads = num_threads or (READS_PAST_CACHE if is_direct else READS_IN_FLIGHT)
        # copies from the page cache take cores, so that they land one after another
        self.is_concurrent = is_direct
        self._kept = kept
        self._num_reading = 0
        self._since_s = 0.0
        self._page_cache = "bypassed" if is_direct else "used"
        super().__init__(source, shape, patience_s=patience_s)

    def issue(
        self, key: int, slot: torch.Tensor, *, urgency: int, bits: int = FULL_BITS
    ) -> ThreadTransfer:
        if self._kept and urgency == DEMAND and slot.nbytes <= _AT_ONCE_NBYTES and not self._closed:
            begin_s = time.perf_counter()
            if self._kept[bits].read_kept(*divmod(key, self._shape.num_experts), slot):
                with self._wake:
                    self.copy_s += time.perf_counter() - begin_s
                    self._copied_nbytes += slot.nbytes
                return ThreadTransfer(key, slot, urgency, bits, started=True, landed=LANDED)
        return super().issue(key, slot, urgency=urgency, bits=bits)

    def conditions(self) -> dict[str, float | str]:
        return super().conditions() | {
            "reads_in_flight": self.num_threads,
            "page_cache": self._page_cache,
        }

    def _move(self, transfer: ThreadTransfer) -> None:
        with self._wake:
            self._since_s = self._since_s if self._num_reading else time.perf_counter()
            self._num_reading += 1
        try:
            self._read(transfer, transfer.slot)
        finally:
            with self._wake:
                self._count(transfer.slot.nbytes)

    def _count(self, nbytes: int) -> None:
        """Count a read that has ended. Seconds in which several reads were under way count once."""
        now_s = time.perf_counter()
        self.copy_s += now_s - self._since_s
        self._since_s = now_s
        self._num_reading -= 1
        self._copied_nbytes += nbytes
