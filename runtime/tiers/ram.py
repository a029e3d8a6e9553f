"""The slow tier in RAM: every expert, read once."""

from collections.abc import Callable

import torch

from runtime.model.layout import ExpertStore, aligned, fill, round_up


class RamStore:
    """The slow tier in RAM: every expert of `disk`, copied once into one aligned slab [L*E, nbytes].

    `pin` page-locks the slab for asynchronous copies to a GPU; `progress`, if given, hears how many experts are in.
    Raises OutOfResources when there is no room for the slab.
    """

    def __init__(self, disk: ExpertStore, *, pin: bool = False, progress: Callable[[int], None] | None = None) -> None:
        self.layout, self.shape, self.is_pinned = disk.layout, disk.shape, pin
        stride = round_up(self.layout.nbytes)
        slab = aligned(self.shape.num_keys * stride, pin=pin).view(self.shape.num_keys, stride)
        self._experts = list(slab[:, : self.layout.nbytes].unbind())
        for key in range(self.shape.num_keys):
            disk.read(*divmod(key, self.shape.num_experts), slab[key])
            if progress is not None:
                progress(key + 1)

    def view(self, layer: int, expert: int) -> torch.Tensor:
        """The expert's bytes, uint8 [nbytes], where they lie."""
        return self._experts[layer * self.shape.num_experts + expert]

    def read(self, layer: int, expert: int, out: torch.Tensor) -> None:
        """Copy one expert into `out`, uint8 [nbytes] or longer."""
        fill(out, self.view(layer, expert))
