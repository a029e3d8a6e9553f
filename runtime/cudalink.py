"""The link of a GPU: pinned host memory to preallocated slots on a copy stream, ordered by events, never a
device-wide wait."""

import threading
from collections import deque

import torch

from artifacts.shape import Shape
from runtime.link import Source, ThreadLink, Transfer

_IN_FLIGHT = 2  # copies handed to the stream at a time: enough to keep it busy, few enough for demand to overtake


class CudaLink(ThreadLink):
    """A thread feeds the copy stream, so that a demand load waits for at most two copies, not for a queue of
    prefetches.

    A slot is written only after the compute that last read it (`_read_by`), and read only after its copy (`_copied`).
    Slots are
    one tensor that lives as long as the link, so that the allocator never hears of streams. Reading from a source
    that is not
    pinned goes through a pinned staging buffer of one expert.
    """

    kind = "cuda"

    def __init__(self, source: Source, shape: Shape, *, device: torch.device, slot_nbytes: int) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)
        self._read_by: dict[int, torch.cuda.Event] = {}
        self._copied: dict[Transfer, torch.cuda.Event] = {}
        self._flight: deque[torch.cuda.Event] = deque()
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._books = threading.Lock()
        view = getattr(source, "view", None)
        self._view = view if view is not None and view(0, 0).is_pinned() else None
        self._staging = deque(
            torch.empty(slot_nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(_IN_FLIGHT + 1)
        )
        super().__init__(source, shape)

    def _move(self, transfer: Transfer) -> None:
        while len(self._flight) >= _IN_FLIGHT:
            self._flight.popleft().synchronize()
        host = self._host_copy(transfer.key)
        with torch.cuda.stream(self._copies):
            with self._books:
                reader = self._read_by.pop(transfer.slot.data_ptr(), None)
            if reader is not None:
                self._copies.wait_event(reader)
            transfer.slot.copy_(host, non_blocking=True)
            copied = torch.cuda.Event(enable_timing=True)
            copied.record(self._copies)
        self._flight.append(copied)
        with self._books:
            self._copied[transfer] = copied

    def _host_copy(self, key: int) -> torch.Tensor:
        if self._view is not None:
            return self._view(*divmod(key, self._shape.num_experts))
        self._staging.rotate(1)  # one more buffer than copies in flight, so the one reused has been read
        self._read(key, self._staging[0])
        return self._staging[0]

    def collect(self, transfer: Transfer) -> None:
        """The compute stream waits for the copy; the host waits only until the copy is queued."""
        super().collect(transfer)
        with self._books:
            copied = self._copied.pop(transfer)
        stream = torch.cuda.current_stream(self._device)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(copied)
        after.record(stream)
        self._stalls.append((before, after))

    def cancel(self, transfer: Transfer) -> None:
        super().cancel(transfer)
        with self._books:
            copied = self._copied.pop(transfer, None)
        if copied is not None:
            torch.cuda.current_stream(self._device).wait_event(copied)

    def computed(self, slot: torch.Tensor) -> None:
        read = torch.cuda.Event()
        read.record(torch.cuda.current_stream(self._device))
        with self._books:
            self._read_by[slot.data_ptr()] = read

    def drain_stalls(self) -> float:
        """Seconds for which the compute stream stood still, from events; waits for the last of them."""
        super().drain_stalls()
        if self._stalls:
            self._stalls[-1][1].synchronize()
        stall_s = sum(before.elapsed_time(after) for before, after in self._stalls) / 1e3
        self._stalls.clear()
        return stall_s
