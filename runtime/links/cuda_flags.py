"""Copies to a GPU that kernels wait for by a number in the device's memory, without events: while
one graph computes a token, the host queues what it decides."""

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from runtime.links.cuda import PIECE_NBYTES, CudaLink, CudaTransfer, to_transfer
from runtime.links.link import DEMAND, LANDED, Wanted

_NOT_QUEUED = -1
_PIECES_AHEAD = 1.5  # under way when the next one is handed over
_USUAL_RATE = 16e9  # bytes per second, until events have measured copies


class FlaggedCopies:
    """Carries out transfers from page-locked memory on the link's stream of demands, from `begin`
    to `end`, all on the caller's thread. A number follows each transfer, or some together, into
    `landed`, int32 [1] of the device: it is copied once the bytes before it are there. `numbers`,
    page-locked int32 [N], has its own places; number i is copied from place i modulo N.

    Nothing but the order of calls orders the accesses of a slot. It is written after the copies
    into it that were queued before, as there is one stream. The caller makes sure that no
    compute still reads the slot's old contents, as `runtime.engine.host_road` does.

    Prefetches are handed over piece by piece by `pump`, so that a demand waits for some two pieces
    at most. No copy is asked whether it has ended: the rate that events measured says when the
    stream will be free.
    """

    def __init__(self, link: CudaLink, landed: torch.Tensor, numbers: torch.Tensor) -> None:
        self._link = link
        self._landed = landed
        self._numbers = numbers
        self._queue: deque[CudaTransfer] = deque()
        self._last = self._known = 0  # numbers: queued last, and known to have come
        self._free_at_s = 0.0  # when all that was handed over will have been copied
        self._is_current = False  # the stream of copies
        self._nbytes = 0  # handed over since the device spoke
        self._bytes_per_s = _USUAL_RATE

    def begin(self, pending: Collection[CudaTransfer]) -> None:
        """Take over from the link. Compute that is queued from here on may read the slots of
        `pending` transfers."""
        self._link.collect_all([*pending])
        self._link.join_streams()
        _note_landed(pending)
        self._bytes_per_s = self._link.bytes_per_s or _USUAL_RATE

    def end(self, pending: Collection[CudaTransfer]) -> None:
        """Give back to the link, as `begin` took over. Prefetches that are not `pending` are
        forgotten."""
        self._queue.clear()
        self._hand_over_all([one for one in pending if not one.is_whole])
        self._link.join_streams()
        _note_landed(pending)

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Make the stream of copies the current one, for several calls: torch takes long to change
        it."""
        if self._is_current:
            yield
            return
        self._is_current = True
        try:
            with self._link.queueing_demands():
                yield
        finally:
            self._is_current = False

    def issue_all(self, loads: Iterable[Wanted], *, urgency: int) -> list[CudaTransfer]:
        """Queue transfers: the bytes of demands at once, those of prefetches by `pump`."""
        transfers = [to_transfer(load, urgency, LANDED) for load in loads]
        for transfer in transfers:
            transfer.number = _NOT_QUEUED
        if urgency == DEMAND:
            self._hand_over_all(transfers)
        else:
            self._queue += transfers
        return transfers

    def cancel(self, transfer: CudaTransfer) -> None:
        """Copy nothing more of the transfer. The next one into its slot is copied behind it."""
        if not transfer.is_whole:
            self._queue.remove(transfer)

    def number_behind(self, transfers: Sequence[CudaTransfer]) -> int:
        """Return the number for which a kernel must wait before it reads these slots, -1 for none.
        What is left of prefetches is handed over at once."""
        if rest := [one for one in transfers if not one.is_whole]:
            for transfer in rest:
                self._queue.remove(transfer)
            self._hand_over_all(rest)
        if new := [one for one in transfers if one.number == _NOT_QUEUED]:
            self._queue_number(new)
        last = max([one.number for one in transfers], default=0)
        return last % len(self._numbers) if last > self._known else -1

    def pump(self) -> None:
        """Hand over the next pieces of prefetches while little is under way."""
        while self._queue:
            ahead_s = self._free_at_s - time.perf_counter()
            if ahead_s * self._bytes_per_s > _PIECES_AHEAD * PIECE_NBYTES:
                return
            self._hand_over_next(PIECE_NBYTES)

    def pump_all(self) -> None:
        """Hand over all prefetches: for a time in which no demand can come."""
        while self._queue:
            self._hand_over_next(self._queue[0].nbytes)

    def told(self, landed: int, stall_s: float) -> None:
        """Note what the device said: the number in `landed`, and for how long it has waited."""
        self._known = self._last - (self._last - landed) % len(self._numbers)
        self._link.add_flagged(self._nbytes, self._bytes_per_s, stall_s)
        self._nbytes = 0

    def _hand_over_next(self, nbytes: int) -> None:
        transfer = self._queue[0]
        with self.queueing():
            self._copy(transfer, min(transfer.nbytes, transfer.num_handed + nbytes))
        if transfer.is_whole:
            self._queue.popleft()
            self._queue_number([transfer])

    def _hand_over_all(self, transfers: Sequence[CudaTransfer]) -> None:
        if transfers:
            with self.queueing():
                for transfer in transfers:
                    self._copy(transfer, transfer.nbytes)

    def _copy(self, transfer: CudaTransfer, stop: int) -> None:
        nbytes = stop - transfer.num_handed
        self._link.queue_bytes(transfer, stop)
        transfer.num_handed = stop
        self._nbytes += nbytes
        begin_s = max(self._free_at_s, time.perf_counter())
        self._free_at_s = begin_s + nbytes / self._bytes_per_s

    def _queue_number(self, transfers: Iterable[CudaTransfer]) -> None:
        """Queue the next number, behind these transfers, whose bytes are handed over."""
        self._last += 1
        for transfer in transfers:
            transfer.number = self._last
        place = self._last % len(self._numbers)
        with self.queueing():
            self._landed.copy_(self._numbers[place : place + 1], non_blocking=True)


def _note_landed(transfers: Iterable[CudaTransfer]) -> None:
    """Note that all compute that is queued from here on may read these slots."""
    for transfer in transfers:
        transfer.num_handed = transfer.nbytes
        transfer.copy = None
        transfer.number = 0
