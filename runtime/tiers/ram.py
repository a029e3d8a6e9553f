"""Experts in RAM."""

from collections.abc import Callable

import torch

from runtime.links.page_lock import PageLock, check_budget
from runtime.model.layout import ExpertStore, aligned, fill, round_up


class RamStore(ExpertStore):
    """All experts that `disk` reads, copied once into one aligned buffer [L*E, nbytes].

    `pin` page-locks the buffer, layer by layer as it is written, for asynchronous copies to a GPU;
    `progress`, if given, is called with the number of experts copied so far. Raises OutOfResources
    when there is no room for the buffer, BadInput when the files change meanwhile.
    """

    def __init__(
        self, disk: ExpertStore, *, pin: bool = False, progress: Callable[[int], None] | None = None
    ) -> None:
        self.layout = disk.layout
        self.shape = disk.shape
        self.is_pinned = pin
        num_keys = self.shape.num_keys
        stride = round_up(self.layout.nbytes)
        if pin:
            check_budget(num_keys * stride)
        self.buffer = aligned(num_keys * stride).view(num_keys, stride)
        lock = PageLock(self.buffer, self) if pin else None
        for key in range(num_keys):
            layer, expert = divmod(key, self.shape.num_experts)
            disk.read(layer, expert, self.buffer[key])
            if lock is not None and expert == self.shape.num_experts - 1:
                lock.lock_to((key + 1) * stride)
            if progress is not None:
                progress(key + 1)
        disk.check_unchanged()
        self._experts = list(self.buffer[:, : self.layout.nbytes].unbind())

    def view(self, layer: int, expert: int) -> torch.Tensor:
        return self._experts[layer * self.shape.num_experts + expert]

    def check_unchanged(self) -> None:
        """Return always: the experts are copies of one checkpoint, whatever its files hold by
        now."""

    def read(self, layer: int, expert: int, out: torch.Tensor) -> None:
        """Copy one expert to the start of `out`, uint8 [nbytes] or longer."""
        fill(out, self.view(layer, expert))
