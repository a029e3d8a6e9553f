"""The replicas that stay in the fast tier: one of every expert, each at its own number of bits."""

from collections.abc import Mapping

import numpy as np
import torch

from artifacts.quantisation.packing import Packed
from runtime.model.layout import aligned
from runtime.tiers.replicas import ReplicaStore


class Shadows:
    """Reads the replica of `bits[key]` of every expert into one buffer on `device`, one after another.

    `widths` has the bits of each key, `layouts` the layout of each number of bits in use; `starts` the offset of each
    key in `buffer`, uint8. Raises BadInput for a damaged file, OutOfResources when there is no room.
    """

    def __init__(self, stores: Mapping[int, ReplicaStore], bits: np.ndarray, device: torch.device) -> None:
        layouts = [stores[width].layout for width in bits.tolist()]
        self.layouts = {layout.bits: layout for layout in layouts}
        self.widths = bits.tolist()
        ends = np.cumsum([layout.nbytes for layout in layouts]).tolist()
        self.starts = [0, *ends[:-1]]
        buffer = aligned(ends[-1])
        for key, (width, start) in enumerate(zip(bits.tolist(), self.starts, strict=True)):
            store = stores[width]
            store.read(*divmod(key, store.shape.num_experts), buffer[start:])
        self.buffer = buffer.to(device)
        self._start = self.buffer.data_ptr()
        self._views = [layout.views(self.buffer[start:]) for layout, start in zip(layouts, self.starts, strict=True)]

    @property
    def nbytes(self) -> int:
        return self.buffer.numel()

    def views(self, key: int) -> dict[str, Packed | torch.Tensor]:
        """Projections and biases of one expert by name."""
        return self._views[key]

    def address(self, key: int) -> int:
        """The address of one expert."""
        return self._start + self.starts[key]
