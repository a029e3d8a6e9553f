"""The link of experts that stay on disk: several reads are under way, so that the device always has
a next one."""

import time
from collections.abc import Mapping

import torch

from artifacts.shape import FULL_BITS, Shape
from runtime.links.link import DEMAND, LANDED, PATIENCE_S, ExpertSource, ThreadLink, ThreadTransfer
from runtime.model.layout import ExpertStore

# docs/disk.md: with one the device idles while bytes are copied; more than four gain little
READS_IN_FLIGHT = 4
READS_PAST_CACHE = 8  # past the page cache a thread only waits, and copies next to nothing
# up to here a copy from the page cache takes less time than a thread switch and back
_AT_ONCE_NBYTES = 1 << 20


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
