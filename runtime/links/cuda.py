"""The link of a GPU: copies from pinned host memory to slots on two streams, ordered by events alone."""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from artifacts.shape import FULL_BITS, Shape
from runtime.links.cuda_events import Copy, CopyTimes, EventPool
from runtime.links.link import DEMAND, LANDED, ExpertSource, ThreadLink, ThreadTransfer, Wanted
from runtime.model.layout import aligned

PIECE_NBYTES = 4 << 20  # of a prefetch: a driver finishes the copies under way before a demand, whatever its priority
_IN_FLIGHT = 2  # pieces that are queued at a time: enough to keep a stream busy, few enough to overtake


@dataclass(eq=False, slots=True)
class CudaTransfer(ThreadTransfer):
    """`num_handed` bytes were handed over to a stream, the last of them by `copy`. `is_taken`: the thread hands over no
    more. `unread`: after it, compute no longer reads what the slot held; None once a stream waits for it."""

    unread: torch.cuda.Event | None = None
    num_handed: int = 0
    copy: Copy | None = None
    is_taken: bool = False


@dataclass(slots=True)
class _Staging:
    """A pinned buffer, and the end of the last copy out of it."""

    buffer: torch.Tensor
    read: torch.cuda.Event


class CudaLink(ThreadLink):
    """Has two copy streams, one for demands and one for prefetches.

    A demand from pinned memory is queued on its stream at once. A thread hands over prefetches piece by piece, and none
    while demands are under way, so that a demand waits for two pieces at most. What is left of a prefetch that compute
    asks for is queued as a demand; what is left of a cancelled one is not copied. From memory that is not pinned the
    thread moves all transfers: it reads them through pinned buffers of `slot_nbytes`.

    Events order each slot's accesses. A slot is written after all compute that was queued when its transfer was issued,
    as no other compute may still read it, and after the previous copy into it, which may be under way on the other
    stream. It is read after its copy: the compute stream waits on collection. The slots are one tensor that outlives
    the link, so that the allocator need not know of the streams.
    """

    kind = "cuda"
    is_queued = True

    def __init__(
        self, source: ExpertSource, shape: Shape, *, device: torch.device, slot_nbytes: int, is_pinned: bool
    ) -> None:
        self._device = device
        self._demands, self._prefetches = torch.cuda.Stream(device), torch.cuda.Stream(device)
        for stream in (self._demands, self._prefetches):
            stream.wait_stream(torch.cuda.current_stream(device))  # it may still use the memory that slots have now
        self._pool = EventPool()
        self._times = CopyTimes(self._pool)
        self._written: dict[int, Copy] = {}  # by slot: the last copy into it
        self._handing = threading.Lock()  # held by the thread that hands bytes over, and by `_take`, which ends that
        self._demanded = torch.cuda.Event()  # the end of the last demand
        self._pieces = deque(torch.cuda.Event() for _ in range(_IN_FLIGHT))  # the ends of the thread's last pieces
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._is_pinned = is_pinned
        count = 0 if is_pinned else _IN_FLIGHT
        self._staging = deque(_Staging(aligned(slot_nbytes, pin=True), torch.cuda.Event()) for _ in range(count))
        super().__init__(source, shape)

    # Called on the computing thread

    def issue(self, key: int, slot: torch.Tensor, *, urgency: int, bits: int = FULL_BITS) -> CudaTransfer:
        return self.issue_all([Wanted(key, slot, bits)], urgency=urgency)[0]

    def issue_all(self, loads: Iterable[Wanted], *, urgency: int) -> list[CudaTransfer]:
        if self._is_pinned and urgency == DEMAND:
            transfers = [CudaTransfer(load.key, load.slot, urgency, load.bits, landed=LANDED) for load in loads]
            self._demands_wait_for(torch.cuda.current_stream(self._device))
            self._hand_over_all(transfers)
            return transfers
        transfers = [CudaTransfer(load.key, load.slot, urgency, load.bits) for load in loads]
        for transfer in transfers:
            transfer.unread = self._pool.take()
            transfer.unread.record(torch.cuda.current_stream(self._device))
            self._enqueue(transfer)
        return transfers

    def has_landed(self, transfer: CudaTransfer) -> bool:
        return transfer.error is not None or self._has_come(transfer)

    def collect(self, transfer: CudaTransfer) -> None:
        self.collect_all([transfer])

    def collect_all(self, transfers: Sequence[CudaTransfer]) -> None:
        """The compute stream waits for the copies; the host waits only until they are queued."""
        if late := [transfer for transfer in transfers if not self._has_come(transfer)]:
            stream = torch.cuda.current_stream(self._device)
            asked, resumed = self._pool.take(), self._pool.take()
            asked.record(stream)  # before the host waits, so that the time in which nothing is queued counts
            self._queue_all_of(late)
            for copy in {transfer.copy.stream: transfer.copy for transfer in self._in_order(late)}.values():
                stream.wait_event(copy.done)
            resumed.record(stream)
            self._waits.append((asked, resumed))
        self._release(transfers)

    def cancel(self, transfer: CudaTransfer) -> None:
        """Nothing more of it is copied. What was handed over goes before the next copy into the slot."""
        with self._wake:
            if not transfer.started:
                self._unqueue(transfer)
        self._take([transfer])
        self._release([transfer])

    def clear(self) -> None:
        """Remove every transfer from the queue; nothing more is copied of those that have begun."""
        super().clear()
        with self._wake:
            running = list(self._running)
        self._take(running)

    def wait_for_copies(self) -> None:
        """Return at once: what was handed over goes before all transfers that are issued from here on."""

    def drain_stalls(self) -> float:
        """Seconds for which the compute stream waited, by its own events. Waits for the last of them."""
        super().drain_stalls()
        self._measure()
        if self._waits:
            self._waits[-1][1].synchronize()
        stall_s = sum(asked.elapsed_time(resumed) for asked, resumed in self._waits) / 1e3
        for pair in self._waits:
            self._pool.give_back(*pair)
        self._waits.clear()
        return stall_s

    def conditions(self) -> dict[str, float | str]:
        """The conditions with the measured rate of copies, by the copy streams' own events."""
        self._measure()
        return super().conditions() | {"host_memory": "pinned" if self._is_pinned else "staged"}

    def close(self) -> None:
        super().close()
        for stream in (self._demands, self._prefetches):
            stream.synchronize()  # a prefetch may be under way to a slot whose memory is used again next

    def _has_come(self, transfer: CudaTransfer) -> bool:
        is_whole = transfer.num_handed == transfer.slot.nbytes
        return is_whole and (transfer.copy is None or transfer.copy.done.query())

    def _queue_all_of(self, transfers: Sequence[CudaTransfer]) -> None:
        """Put all of these transfers on a stream: at once from pinned memory, else by the thread."""
        if not self._is_pinned:
            for transfer in transfers:
                super().collect(transfer)
            return
        with self._wake:
            for transfer in transfers:
                if not transfer.started:
                    self._unqueue(transfer)
        self._hand_over_all(transfers)

    def _hand_over_all(self, transfers: Sequence[CudaTransfer]) -> None:
        """Queue what is left of these transfers as demands."""
        with self._handing, torch.cuda.stream(self._demands):
            for transfer in transfers:
                transfer.started = transfer.is_taken = True
                if transfer.num_handed < transfer.slot.nbytes:
                    self._hand_over(transfer, self._view(transfer), self._demands, transfer.slot.nbytes)
                transfer.error = None  # of a piece, which is handed over by now
                if transfer.landed is not LANDED:
                    transfer.landed.set()
            self._demanded.record(self._demands)

    def _in_order(self, transfers: Sequence[CudaTransfer]) -> list[CudaTransfer]:
        """By the order in which their last bytes were handed over: on a stream the last of them ends last."""
        return sorted(transfers, key=lambda transfer: transfer.copy.number)

    def _take(self, transfers: Sequence[CudaTransfer]) -> None:
        """End the handing over of these transfers: the link's thread hands over no further piece of them."""
        with self._handing:
            for transfer in transfers:
                transfer.is_taken = True
                self._give_back_unread(transfer)

    def _release(self, transfers: Sequence[CudaTransfer]) -> None:
        """Forget when these transfers end."""
        with self._handing:
            for transfer in transfers:
                if transfer.copy is not None:
                    self._times.release(transfer.copy)
                    transfer.copy = None

    def _demands_wait_for(self, stream: torch.cuda.Stream) -> None:
        """Make all demands from here on wait for what is queued on the stream so far."""
        unread = self._pool.take()
        unread.record(stream)
        self._demands.wait_event(unread)
        self._pool.give_back(unread)

    def _measure(self) -> None:
        with self._handing:
            seconds, nbytes = self._times.drain()
        self.copy_s += seconds
        self._copied_nbytes += nbytes

    # Called on the link's own thread

    def _move(self, transfer: CudaTransfer) -> None:
        if self._is_pinned:
            self._hand_over_in_pieces(transfer, self._view(transfer))
            return
        staging = self._staging[0]
        staging.read.synchronize()
        host = staging.buffer[: transfer.slot.nbytes]
        self._read(transfer, host)
        self._staging.rotate(1)  # not before: a failed read leaves its buffer for the next one
        self._hand_over_in_pieces(transfer, host, staging.read)

    def _hand_over_in_pieces(
        self, transfer: CudaTransfer, host: torch.Tensor, read: torch.cuda.Event | None = None
    ) -> None:
        """Hand over a transfer piece by piece, to its end or until `_take` ends it; then record `read`."""
        is_demand, nbytes = transfer.urgency == DEMAND, transfer.slot.nbytes
        stream = self._demands if is_demand else self._prefetches
        with torch.cuda.stream(stream):
            while transfer.num_handed < nbytes and not transfer.is_taken:
                self._pieces[0].synchronize()
                if not is_demand:
                    self._demanded.synchronize()
                with self._handing:
                    if not transfer.is_taken:
                        stop = nbytes if is_demand else min(nbytes, transfer.num_handed + PIECE_NBYTES)
                        self._hand_over(transfer, host, stream, stop)
                        for event in (self._pieces[0], *([read] if read else []), *([self._demanded] * is_demand)):
                            event.record(stream)
                        self._pieces.rotate(-1)

    # Called on both threads, within `_handing`

    def _hand_over(self, transfer: CudaTransfer, host: torch.Tensor, stream: torch.cuda.Stream, stop: int) -> None:
        """Queue the bytes of a transfer up to `stop` on a stream, which is the current one."""
        place, first = transfer.slot.data_ptr(), transfer.num_handed
        before = self._written.get(place)
        if transfer.unread is not None:
            stream.wait_event(transfer.unread)
            self._give_back_unread(transfer)
        if before is not None and before.stream is not stream:
            stream.wait_event(before.done)
        is_whole = stop - first == transfer.slot.nbytes
        slot, host = (transfer.slot, host) if is_whole else (transfer.slot[first:stop], host[first:stop])
        copy = self._times.begin(stream, stop - first)
        slot.copy_(host, non_blocking=True)
        self._times.end(copy)
        self._written[place] = self._times.hold(copy, before)
        transfer.copy = self._times.hold(copy, transfer.copy)
        transfer.num_handed = stop

    def _give_back_unread(self, transfer: CudaTransfer) -> None:
        if transfer.unread is not None:
            self._pool.give_back(transfer.unread)
            transfer.unread = None

    def _view(self, transfer: CudaTransfer) -> torch.Tensor:
        return self._source.view(*divmod(transfer.key, self._shape.num_experts), bits=transfer.bits)
