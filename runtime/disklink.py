"""The link of experts that stay on disk: several reads under way, so that the device always has a next one to serve."""

import time

from artifacts.shape import Shape
from runtime.link import PATIENCE_S, Source, ThreadLink, ThreadTransfer

READS_IN_FLIGHT = 4  # docs/disk.md: one leaves the device idle while its bytes are copied, more bring little more


class DiskLink(ThreadLink):
    """Reads experts from the checkpoint as they are wanted; what the process holds is its slots. `is_direct`, for the
    receipt: its source bypasses the page cache.

    The bandwidth it tells is that while it was reading: bytes over the seconds in which any read was under way.
    """

    kind = "disk"

    def __init__(
        self,
        source: Source,
        shape: Shape,
        *,
        is_direct: bool = False,
        num_threads: int = READS_IN_FLIGHT,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.num_threads = num_threads
        self._num_reading, self._since_s = 0, 0.0
        self._page_cache = "bypassed" if is_direct else "used"
        super().__init__(source, shape, patience_s=patience_s)

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
