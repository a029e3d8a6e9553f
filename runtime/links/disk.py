"""The link of experts that stay on disk: several reads under way, so that the device always has a next one to serve."""

import threading
import time
from typing import Protocol

import torch

from artifacts.shape import FULL_BITS, Shape
from runtime.links.link import DEMAND, PATIENCE_S, Source, ThreadLink, ThreadTransfer

READS_IN_FLIGHT = 4  # docs/disk.md: one leaves the device idle while its bytes are copied, more bring little more
READS_PAST_CACHE = 8  # a thread waits for all of what it reads there, and has next to nothing to copy
_AT_ONCE_NBYTES = 1 << 20  # what takes longer to hand to a thread and back than to copy out of the page cache

_THERE = threading.Event()
_THERE.set()


class KeptSource(Source, Protocol):
    """A source of which a part may be in memory."""

    def read_kept(self, layer: int, expert: int, out: torch.Tensor, *, bits: int) -> bool: ...


class DiskLink(ThreadLink):
    """Reads experts from the checkpoint as they are wanted; what the process holds is its slots. `is_direct`: its
    source bypasses the page cache. What `kept` has in memory it gives at once, to whoever asks, if it is small.

    The bandwidth it tells is that while it was reading: bytes over the seconds in which any read was under way.
    """

    kind = "disk"

    def __init__(
        self,
        source: Source,
        shape: Shape,
        *,
        kept: KeptSource | None = None,
        is_direct: bool = False,
        num_threads: int | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.num_threads = num_threads or (READS_PAST_CACHE if is_direct else READS_IN_FLIGHT)
        self.side_by_side = is_direct  # the page cache is copied out of, which takes cores: one after another lands
        self._kept = kept
        self._num_reading, self._since_s = 0, 0.0
        self._page_cache = "bypassed" if is_direct else "used"
        super().__init__(source, shape, patience_s=patience_s)

    def issue(self, key: int, slot: torch.Tensor, *, urgency: int, bits: int = FULL_BITS) -> ThreadTransfer:
        if self._kept and urgency == DEMAND and slot.nbytes <= _AT_ONCE_NBYTES and not self._closed:
            begin_s = time.perf_counter()
            if self._kept.read_kept(*divmod(key, self._shape.num_experts), slot, bits=bits):
                with self._wake:
                    self.copy_s += time.perf_counter() - begin_s
                    self._copied_nbytes += slot.nbytes
                return ThreadTransfer(key, slot, urgency, bits, started=True, landed=_THERE)
        return super().issue(key, slot, urgency=urgency, bits=bits)

    def conditions(self) -> dict[str, float | str]:
        return super().conditions() | {"reads_in_flight": self.num_threads, "page_cache": self._page_cache}

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
        """Time goes by once, however many read meanwhile."""
        now_s = time.perf_counter()
        self.copy_s += now_s - self._since_s
        self._since_s = now_s
        self._num_reading -= 1
        self._copied_nbytes += nbytes
