"""The link of a GPU: copies from pinned host memory to slots on two streams, ordered by events
alone."""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from artifacts.shape import FULL_BITS, Shape
from runtime.links.cuda_events import Copy, CopyTimes, EventPool, StreamPoint, last_by_stream
from runtime.links.link import DEMAND, LANDED, ExpertSource, ThreadLink, ThreadTransfer, Wanted
from runtime.model.layout import aligned

# of a prefetch: a driver finishes the copies under way before a demand, whatever its priority
PIECE_NBYTES = 4 << 20
# pieces that are queued at a time: enough to keep a stream busy, few enough to overtake
_IN_FLIGHT = 2


@dataclass(slots=True)
class _Staging:
    """A pinned buffer, and the end of the last copy out of it."""

    buffer: torch.Tensor
    read: torch.cuda.Event


@dataclass(eq=False, slots=True)
class CudaTransfer(ThreadTransfer):
    """A transfer to a GPU. `num_handed` of its `nbytes` bytes were handed over to a stream, the
    last of them by `copy`. `place` is the address of the slot. `is_taken`: the thread hands over no
    more. `unread`: after it, compute no longer reads the slot's old contents; None once a stream
    waits for it. `number` is what kernels wait for in the place of `copy`, on the road of
    `runtime.links.cuda_flags`."""

    nbytes: int = 0
    place: int = 0
    unread: StreamPoint | None = None
    num_handed: int = 0
    copy: Copy | None = None
    is_taken: bool = False
    number: int = 0

    @property
    def is_whole(self) -> bool:
        """True if all bytes of the transfer were handed over."""
        return self.num_handed == self.nbytes


def to_transfer(load: Wanted, urgency: int, landed: threading.Event) -> CudaTransfer:
    """Return a transfer of this load; nothing of it is handed over yet."""
    key, slot, bits = load
    # by place: by name they would take Python three times as long
    has_started = False
    error = None
    return CudaTransfer(
        key, slot, urgency, bits, has_started, landed, error, slot.nbytes, slot.data_ptr()
    )


class CudaLink(ThreadLink):
    """Link with two copy streams, one for demands and one for prefetches.

    A demand from pinned memory is queued on its stream at once. A thread hands over prefetches
    piece by piece, and none while demands are under way, so that a demand waits for two pieces at
    most. The rest of a prefetch that compute asks for is queued as a demand; the rest of a
    cancelled prefetch is not copied. From memory that is not pinned the thread moves all transfers:
    it reads them through pinned buffers of `slot_nbytes`.

    Events order each slot's accesses. A slot is written after all compute that was queued when its
    transfer was issued, as no other compute may still read it. It is also written after the
    previous copy into it, which may be under way on the other stream. It is read after its copy:
    the compute stream waits on collection. The slots are one tensor that outlives the link, so that
    the allocator need not know of the streams.
    """

    kind = "cuda"
    is_queued = True

    def __init__(
        self,
        source: ExpertSource,
        shape: Shape,
        *,
        device: torch.device,
        slot_nbytes: int,
        is_pinned: bool,
    ) -> None:
        self._device = device
        self._demands = torch.cuda.Stream(device)
        self._prefetches = torch.cuda.Stream(device)
        for stream in (self._demands, self._prefetches):
            # it may still use the memory that slots have now
            stream.wait_stream(torch.cuda.current_stream(device))
        self._pool = EventPool()
        self._times = CopyTimes(self._pool)
        self._written: dict[int, Copy] = {}  # by slot: the last copy into it
        self._views: dict[
            tuple[int, int], torch.Tensor
        ] = {}  # by key and bits: where experts lie in RAM
        # held by the thread that hands bytes over, and by `_take`, which ends that
        self._handing = threading.Lock()
        self._demanded = torch.cuda.Event()  # the end of the last demand
        # after it, compute no longer reads the old contents of the last demands' slots
        self._unread = torch.cuda.Event()
        # the ends of the thread's last pieces
        self._pieces = deque(torch.cuda.Event() for _ in range(_IN_FLIGHT))
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._is_pinned = self.takes_flags = is_pinned
        self._flagged_stall_s = 0.0
        count = 0 if is_pinned else _IN_FLIGHT
        self._staging = deque(
            _Staging(aligned(slot_nbytes, pin=True), torch.cuda.Event()) for _ in range(count)
        )
        super().__init__(source, shape)

    # Called on the computing thread

    def issue(
        self, key: int, slot: torch.Tensor, *, urgency: int, bits: int = FULL_BITS
    ) -> CudaTransfer:
        return self.issue_all([Wanted(key, slot, bits)], urgency=urgency)[0]

    def issue_all(self, loads: Iterable[Wanted], *, urgency: int) -> list[CudaTransfer]:
        if self._is_pinned and urgency == DEMAND:
            transfers = [to_transfer(load, urgency, LANDED) for load in loads]
            self._demands_wait_for(torch.cuda.current_stream(self._device))
            with self._handing, torch.cuda.stream(self._demands):
                self._queue_demands(transfers)
            return transfers
        together = threading.Event() if self._is_pinned else None  # then no thread waits for it
        transfers = [to_transfer(load, urgency, together or threading.Event()) for load in loads]
        unread = StreamPoint(self._pool.take(), self._pool)
        unread.event.record(torch.cuda.current_stream(self._device))
        for transfer in transfers:
            transfer.unread = unread
        self._enqueue(*transfers)
        return transfers

    def has_landed(self, transfer: CudaTransfer) -> bool:
        return transfer.error is not None or not self._late([transfer])

    def collect(self, transfer: CudaTransfer) -> None:
        self.collect_all([transfer])

    def collect_all(self, transfers: Sequence[CudaTransfer]) -> None:
        """Make the compute stream wait for the copies; the host waits only until they are
        queued."""
        if late := self._late(transfers):
            stream = torch.cuda.current_stream(self._device)
            asked = self._pool.take()
            resumed = self._pool.take()
            # before the host waits, so that the time in which nothing is queued counts
            asked.record(stream)
            self._queue_all_of(
                [transfer for transfer in late if not transfer.is_whole or transfer.error]
            )
            for copy in last_by_stream({transfer.copy for transfer in late}):
                stream.wait_event(copy.done)
            resumed.record(stream)
            self._waits.append((asked, resumed))

    def cancel(self, transfer: CudaTransfer) -> None:
        """Copy nothing more of the transfer. The bytes that were handed over are copied before the
        next copy into the slot."""
        with self._wake:
            if not transfer.started:
                self._unqueue(transfer)
        self._take([transfer])

    def clear(self) -> None:
        """Remove every transfer from the queue; transfers that have begun copy nothing more."""
        super().clear()
        self._views.clear()  # experts may be cut anew
        with self._wake:
            running = list(self._running)
        self._take(running)

    def wait_for_copies(self) -> None:
        """Return at once: bytes that were handed over are copied before all transfers that are
        issued from here on."""

    def drain_stalls(self) -> float:
        """Return the seconds for which the compute stream waited, by its own events, of which the
        last one is waited for, or as its kernels said."""
        super().drain_stalls()
        self._measure()
        if self._waits:
            self._waits[-1][1].synchronize()
        stall_s = sum(asked.elapsed_time(resumed) for asked, resumed in self._waits) / 1e3
        stall_s += self._flagged_stall_s
        self._flagged_stall_s = 0.0
        for pair in self._waits:
            self._pool.give_back(*pair)
        self._waits.clear()
        return stall_s

    def conditions(self) -> dict[str, float | str]:
        """Return the conditions with the measured rate of copies, by the copy streams' own
        events."""
        self._measure()
        return super().conditions() | {"host_memory": "pinned" if self._is_pinned else "staged"}

    def close(self) -> None:
        super().close()
        for stream in (self._demands, self._prefetches):
            # a prefetch may be under way to a slot whose memory is used again next
            stream.synchronize()

    # For `FlaggedCopies`, on the computing thread

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that copies have reached so far, 0 before any was measured."""
        self._measure()
        return self._copied_nbytes / self.copy_s if self.copy_s else 0.0

    def join_streams(self) -> None:
        """Make all that is queued from here on, copies or compute, wait for all that is queued."""
        compute = torch.cuda.current_stream(self._device)
        for stream in (self._demands, self._prefetches):
            compute.wait_stream(stream)
        for stream in (self._demands, self._prefetches):
            stream.wait_stream(compute)

    def queueing_demands(self) -> AbstractContextManager:
        """Make the stream of demands the current one."""
        return torch.cuda.stream(self._demands)

    def queue_bytes(self, transfer: CudaTransfer, stop: int) -> None:
        """Queue the bytes of a transfer up to `stop` on the current stream."""
        self._hand_over(transfer, self._kept_view(transfer), stop)

    def add_flagged(self, nbytes: int, bytes_per_s: float, stall_s: float) -> None:
        """Count bytes that were copied without events, by the rate that events measured, and a
        stall that kernels measured."""
        self._flagged_stall_s += stall_s
        self._copied_nbytes += nbytes
        self.copy_s += nbytes / bytes_per_s

    def _late(self, transfers: Sequence[CudaTransfer]) -> list[CudaTransfer]:
        """Return the transfers for which compute has to wait; each copy is queried once."""
        late = []
        has_ended = {None: True}
        for transfer in transfers:
            if transfer.is_whole:  # asked first: only then the copy is the last one
                copy = transfer.copy
                if copy not in has_ended:
                    has_ended[copy] = copy.done.query()
                if has_ended[copy]:
                    continue
            late.append(transfer)
        return late

    def _queue_all_of(self, transfers: Sequence[CudaTransfer]) -> None:
        """Put all of these transfers on a stream: at once from pinned memory, else by the
        thread."""
        if not self._is_pinned:
            for transfer in transfers:
                super().collect(transfer)
        elif transfers:
            with self._wake:
                for transfer in transfers:
                    if not transfer.started:
                        self._unqueue(transfer)
            self._hand_over_all(transfers)

    def _hand_over_all(self, transfers: Sequence[CudaTransfer]) -> None:
        """Queue the rest of these transfers, which the thread may be handing over, as demands."""
        with self._handing, torch.cuda.stream(self._demands):
            for transfer in transfers:
                transfer.started = transfer.is_taken = True
            self._queue_demands([transfer for transfer in transfers if not transfer.is_whole])
        for transfer in transfers:
            transfer.error = None  # of a piece, which is handed over by now
            transfer.landed.set()

    def _queue_demands(self, transfers: Sequence[CudaTransfer]) -> None:
        """Queue the rest of these transfers between two events for all. Call it within `_handing`,
        while the stream of demands is the current one."""
        self._await_slots(transfers, self._demands)
        copy = self._times.begin(
            self._demands, sum([transfer.nbytes - transfer.num_handed for transfer in transfers])
        )
        for transfer in transfers:
            self._hand_over(transfer, self._kept_view(transfer), transfer.nbytes)
        self._times.end(copy)
        self._note(transfers, copy)
        self._demanded.record(self._demands)

    def _take(self, transfers: Sequence[CudaTransfer]) -> None:
        """End the handing over of these transfers: the link's thread hands over no further piece of
        them."""
        with self._handing:
            for transfer in transfers:
                transfer.is_taken = True
                transfer.unread = None

    def _kept_view(self, transfer: CudaTransfer) -> torch.Tensor:
        at = transfer.key, transfer.bits
        if at not in self._views:
            self._views[at] = self._view(transfer)
        return self._views[at]

    def _demands_wait_for(self, stream: torch.cuda.Stream) -> None:
        """Make all demands from here on wait for everything that is queued on the stream so far."""
        self._unread.record(stream)
        self._demands.wait_event(self._unread)

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
        host = staging.buffer[: transfer.nbytes]
        self._read(transfer, host)
        self._staging.rotate(1)  # not before: a failed read leaves its buffer for the next one
        self._hand_over_in_pieces(transfer, host, staging.read)

    def _hand_over_in_pieces(
        self, transfer: CudaTransfer, host: torch.Tensor, read: torch.cuda.Event | None = None
    ) -> None:
        """Hand over a transfer piece by piece, to its end or until `_take` ends it; then record
        `read`."""
        is_demand = transfer.urgency == DEMAND
        nbytes = transfer.nbytes
        stream = self._demands if is_demand else self._prefetches
        with torch.cuda.stream(stream):
            while transfer.num_handed < nbytes and not transfer.is_taken:
                self._pieces[0].synchronize()
                if not is_demand:
                    self._demanded.synchronize()
                with self._handing:
                    if not transfer.is_taken:
                        stop = (
                            nbytes if is_demand else min(nbytes, transfer.num_handed + PIECE_NBYTES)
                        )
                        self._await_slots([transfer], stream)
                        copy = self._times.begin(stream, stop - transfer.num_handed)
                        self._hand_over(transfer, host, stop)
                        self._times.end(copy)
                        self._note([transfer], copy, stop)
                        for event in (
                            self._pieces[0],
                            *([read] if read else []),
                            *([self._demanded] * is_demand),
                        ):
                            event.record(stream)
                        self._pieces.rotate(-1)

    # Called on both threads, within `_handing`

    def _await_slots(self, transfers: Sequence[CudaTransfer], stream: torch.cuda.Stream) -> None:
        """Make the stream wait until the slots may be written: until their old contents are read,
        and copies into them on another stream have ended."""
        written = self._written
        for transfer in transfers:
            if transfer.unread is not None:
                stream.wait_event(transfer.unread.event)
                transfer.unread = None
            before = written.get(transfer.place)
            if before is not None and before.stream is not stream:
                stream.wait_event(before.done)

    def _hand_over(self, transfer: CudaTransfer, host: torch.Tensor, stop: int) -> None:
        """Queue the bytes of a transfer up to `stop` on the current stream."""
        slot = transfer.slot
        first = transfer.num_handed
        if stop - first < transfer.nbytes:
            slot = slot[first:stop]
            host = host[first:stop]
        slot.copy_(host, non_blocking=True)

    def _note(self, transfers: Sequence[CudaTransfer], copy: Copy, stop: int | None = None) -> None:
        """Note that these transfers were handed over up to `stop`, or whole. `copy` is the copy of
        their last bytes."""
        for transfer in transfers:
            self._written[transfer.place] = transfer.copy = copy
            # last: who sees the number asks for the copy
            transfer.num_handed = stop or transfer.nbytes

    def _view(self, transfer: CudaTransfer) -> torch.Tensor:
        return self._source.view(*divmod(transfer.key, self._shape.num_experts), bits=transfer.bits)
