"""The link of a GPU: pinned host memory to preallocated slots on a copy stream, ordered by events alone."""

from collections import deque
from dataclasses import dataclass

import torch

from artifacts.replicas import FULL_BITS
from artifacts.shape import Shape
from runtime.link import Source, ThreadLink, ThreadTransfer
from runtime.weights import aligned

_IN_FLIGHT = 2  # copies handed to the stream at a time: enough to keep it busy, few enough for demand to overtake


@dataclass(frozen=True, slots=True)
class _Copy:
    begun: torch.cuda.Event
    done: torch.cuda.Event
    nbytes: int


class CudaLink(ThreadLink):
    """A thread feeds the copy stream, so that a demand load waits for two copies at most, not for queued prefetches.

    A slot is written only after all compute queued when its transfer was issued, which is all that may still read it;
    it is read only after its copy, for which compute waits on collection. Copies run one after another, so a slot that
    is given away while a copy into it is under way needs no more than that. Slots are one tensor that outlives the
    link: the allocator never hears of the copy stream. A source that is not pinned is read through pinned buffers of
    `slot_nbytes`.
    """

    kind = "cuda"

    def __init__(
        self, source: Source, shape: Shape, *, device: torch.device, slot_nbytes: int, is_pinned: bool
    ) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)
        self._copies.wait_stream(torch.cuda.current_stream(device))  # which may still use what was there before slots
        self._readable: dict[int, torch.cuda.Event] = {}  # by slot: what its next copy waits for
        self._copied: dict[ThreadTransfer, torch.cuda.Event] = {}
        self._in_flight: deque[_Copy] = deque()
        self._unmeasured: deque[_Copy] = deque()
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._is_pinned = is_pinned
        self._staging = deque(aligned(slot_nbytes, pin=True) for _ in range(0 if is_pinned else _IN_FLIGHT))
        super().__init__(source, shape)

    # On the thread that computes

    def issue(self, key: int, slot: torch.Tensor, *, urgency: int, bits: int = FULL_BITS) -> ThreadTransfer:
        unread = torch.cuda.Event()
        unread.record(torch.cuda.current_stream(self._device))
        self._readable[slot.data_ptr()] = unread  # before the thread can see the transfer
        return super().issue(key, slot, urgency=urgency, bits=bits)

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
        asked.record(stream)  # before the host waits, or the time in which nothing is queued would not be counted
        super().collect(transfer)
        stream.wait_event(self._copied.pop(transfer))
        resumed.record(stream)
        self._waits.append((asked, resumed))

    def cancel(self, transfer: ThreadTransfer) -> None:
        super().cancel(transfer)
        self._copied.pop(transfer, None)

    def drain_stalls(self) -> float:
        """Seconds for which the compute stream stood still, by its own events; waits for the last of them."""
        super().drain_stalls()
        self._measure()
        if self._waits:
            self._waits[-1][1].synchronize()
        stall_s = sum(asked.elapsed_time(resumed) for asked, resumed in self._waits) / 1e3
        self._waits.clear()
        return stall_s

    def conditions(self) -> dict[str, float | str]:
        """With what copies really moved, by the copy stream's own events."""
        self._measure()
        return super().conditions() | {"host_memory": "pinned" if self._is_pinned else "staged"}

    def close(self) -> None:
        super().close()
        self._copies.synchronize()  # the slots' memory goes to others next, and a prefetch may still be under way

    def _measure(self) -> None:
        """Add up the seconds in which the copy stream copied, over the copies that have ended."""
        while self._unmeasured and self._unmeasured[0].done.query():
            copy = self._unmeasured.popleft()
            self.copy_s += copy.begun.elapsed_time(copy.done) / 1e3
            self._copied_nbytes += copy.nbytes

    # On the link's own thread

    def _move(self, transfer: ThreadTransfer) -> None:
        while len(self._in_flight) >= _IN_FLIGHT:
            self._in_flight.popleft().done.synchronize()
        host = self._host_bytes(transfer)
        copy = _Copy(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), transfer.slot.nbytes)
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(self._readable.pop(transfer.slot.data_ptr()))
            copy.begun.record(self._copies)
            transfer.slot.copy_(host, non_blocking=True)
            copy.done.record(self._copies)
        self._staging.rotate(1)  # only now: a read that failed leaves its buffer for the next one
        self._in_flight.append(copy)
        self._unmeasured.append(copy)
        self._copied[transfer] = copy.done

    def _host_bytes(self, transfer: ThreadTransfer) -> torch.Tensor:
        if self._is_pinned:
            return self._source.view(*divmod(transfer.key, self._shape.num_experts), bits=transfer.bits)
        buffer = self._staging[0][: transfer.slot.nbytes]
        self._read(transfer, buffer)  # there are as many buffers as copies in flight, and the oldest has ended
        return buffer
