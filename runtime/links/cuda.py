"""The link of a GPU: copies from pinned host memory to slots on two streams, ordered by events alone."""

from collections import deque
from dataclasses import dataclass

import torch

from artifacts.shape import FULL_BITS, Shape
from runtime.links.link import DEMAND, ExpertSource, ThreadLink, ThreadTransfer
from runtime.model.layout import aligned

_IN_FLIGHT = 2  # copies that the thread queues at a time: enough to keep a stream busy, few enough to overtake
_FIRST = -1  # a stream's priority: lower values go first, and the default is 0


@dataclass(frozen=True, slots=True)
class _Copy:
    begun: torch.cuda.Event
    done: torch.cuda.Event
    nbytes: int


class CudaLink(ThreadLink):
    """Has two copy streams: one for demands, which goes first, and one for prefetches.

    A demand from pinned memory is queued on its stream at once, so that it waits for at most the copies under way. A
    thread feeds the prefetches, and all transfers from memory that is not pinned: it reads them through pinned buffers
    of `slot_nbytes`.

    Events order each slot's accesses. A slot is written after all compute that was queued when its transfer was issued,
    as no other compute may still read it, and after the previous copy into it, which may be under way on the other
    stream. It is read after its copy: the compute stream waits on collection. An expert is one copy. The slots are one
    tensor that outlives the link, so that the allocator need not know of the streams.
    """

    kind = "cuda"

    def __init__(
        self, source: ExpertSource, shape: Shape, *, device: torch.device, slot_nbytes: int, is_pinned: bool
    ) -> None:
        self._device = device
        self._demands, self._prefetches = torch.cuda.Stream(device, priority=_FIRST), torch.cuda.Stream(device)
        for stream in (self._demands, self._prefetches):
            stream.wait_stream(torch.cuda.current_stream(device))  # it may still use the memory that slots have now
        self._unread: dict[int, torch.cuda.Event] = {}  # by slot: after it, compute no longer reads the old content
        self._written: dict[int, torch.cuda.Event] = {}  # by slot: the end of the last copy into it
        self._copied: dict[ThreadTransfer, torch.cuda.Event] = {}
        self._in_flight: deque[_Copy] = deque()
        self._unmeasured: deque[_Copy] = deque()
        self._measured: torch.cuda.Event | None = None  # the latest end among measured copies
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._is_pinned = is_pinned
        self._staging = deque(aligned(slot_nbytes, pin=True) for _ in range(0 if is_pinned else _IN_FLIGHT))
        super().__init__(source, shape)

    # Called on the computing thread

    def issue(self, key: int, slot: torch.Tensor, *, urgency: int, bits: int = FULL_BITS) -> ThreadTransfer:
        unread = torch.cuda.Event()
        unread.record(torch.cuda.current_stream(self._device))
        self._unread[slot.data_ptr()] = unread  # before the thread can see the transfer
        if not self._is_pinned or urgency != DEMAND:
            return super().issue(key, slot, urgency=urgency, bits=bits)
        transfer = ThreadTransfer(key, slot, urgency, bits, started=True)
        self._copy_at_once(transfer)
        return transfer

    def has_landed(self, transfer: ThreadTransfer) -> bool:
        copied = self._copied.get(transfer)
        return transfer.error is not None or copied is not None and copied.query()

    def collect(self, transfer: ThreadTransfer) -> None:
        """The compute stream waits for the copy; the host waits only until the copy is queued."""
        copied = self._copied.get(transfer)
        if copied is not None and copied.query():
            del self._copied[transfer]
            return
        stream = torch.cuda.current_stream(self._device)
        asked, resumed = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        asked.record(stream)  # before the host waits, so that the time in which nothing is queued counts
        super().collect(transfer)
        stream.wait_event(self._copied.pop(transfer))
        resumed.record(stream)
        self._waits.append((asked, resumed))

    def cancel(self, transfer: ThreadTransfer) -> None:
        super().cancel(transfer)
        self._copied.pop(transfer, None)

    def wait_for_copies(self) -> None:
        """Wait until every copy is queued: it then goes before all transfers that are issued from here on."""
        super().wait_for_copies()
        self._copied.clear()

    def drain_stalls(self) -> float:
        """Seconds for which the compute stream waited, by its own events. Waits for the last of them."""
        super().drain_stalls()
        self._measure()
        if self._waits:
            self._waits[-1][1].synchronize()
        stall_s = sum(asked.elapsed_time(resumed) for asked, resumed in self._waits) / 1e3
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

    def _hurry(self, transfer: ThreadTransfer) -> None:
        """Copy a prefetch that compute waits for as a demand, unless it has begun."""
        if not self._is_pinned:
            super()._hurry(transfer)
            return
        super().cancel(transfer)
        if not transfer.landed.is_set():
            self._copy_at_once(transfer)

    def _copy_at_once(self, transfer: ThreadTransfer) -> None:
        self._copy(transfer, self._view(transfer), self._demands)
        transfer.landed.set()

    def _measure(self) -> None:
        """Add up bytes, and the seconds in which at least one copy was under way, over copies that have ended."""
        while self._unmeasured and self._unmeasured[0].done.query():
            copy = self._unmeasured.popleft()
            self.copy_s += self._added_ms(copy) / 1e3
            self._copied_nbytes += copy.nbytes

    def _added_ms(self, copy: _Copy) -> float:
        """A copy's time without the part it shares with earlier copies: one stream waits while the other copies."""
        duration = copy.begun.elapsed_time(copy.done)
        later = duration if self._measured is None else self._measured.elapsed_time(copy.done)
        if later > 0:
            self._measured = copy.done
        return max(0.0, min(duration, later))

    # Called on the link's own thread; `_copy` and `_view` on both threads

    def _move(self, transfer: ThreadTransfer) -> None:
        while len(self._in_flight) >= _IN_FLIGHT:
            self._in_flight.popleft().done.synchronize()
        stream = self._demands if transfer.urgency == DEMAND else self._prefetches
        copy = self._copy(transfer, self._view(transfer) if self._is_pinned else self._staged(transfer), stream)
        self._staging.rotate(1)  # not before: a failed read leaves its buffer for the next one
        self._in_flight.append(copy)

    def _copy(self, transfer: ThreadTransfer, host: torch.Tensor, stream: torch.cuda.Stream) -> _Copy:
        place = transfer.slot.data_ptr()
        copy = _Copy(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), transfer.slot.nbytes)
        with torch.cuda.stream(stream):
            stream.wait_event(self._unread.pop(place))
            if place in self._written:
                stream.wait_event(self._written[place])
            copy.begun.record(stream)
            transfer.slot.copy_(host, non_blocking=True)
            copy.done.record(stream)
        self._written[place] = self._copied[transfer] = copy.done
        self._unmeasured.append(copy)
        return copy

    def _view(self, transfer: ThreadTransfer) -> torch.Tensor:
        return self._source.view(*divmod(transfer.key, self._shape.num_experts), bits=transfer.bits)

    def _staged(self, transfer: ThreadTransfer) -> torch.Tensor:
        # The buffer is free: there are as many as copies in flight, and the oldest copy has ended.
        buffer = self._staging[0][: transfer.slot.nbytes]
        self._read(transfer, buffer)
        return buffer
