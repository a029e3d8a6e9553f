"""The replicas that stay in the fast tier: one of every expert, each at its own number of bits."""

from collections.abc import Mapping

import numpy as np
import torch

from artifacts.quantisation.packing import Packed
from artifacts.quantisation.widths import NOTHING
from runtime.model.layout import aligned
from runtime.tiers.replica_store import ReplicaStore


class Shadows:
    """Reads the replica of `bits[key]` of every expert into one buffer on `device`, one after
    another. Experts of `NOTHING` share one narrowest replica of zeros, so that kernels need not
    know of them.

    `widths` has the bits of each key, `layouts` the layout of each number of bits in use; `starts`
    the offset of each key in `buffer`, uint8. Raises BadInput for a damaged file, OutOfResources
    when there is no room.
    """

    def __init__(
        self, stores: Mapping[int, ReplicaStore], bits: np.ndarray, device: torch.device
    ) -> None:
        self.widths = bits.tolist()
        by_width = {NOTHING: stores[min(stores)].layout} | {
            width: store.layout for width, store in stores.items()
        }
        self.layouts = {width: by_width[width] for width in self.widths}
        layouts = [by_width[width] for width in self.widths]
        is_made = bits != NOTHING
        ends = np.cumsum(
            [layout.nbytes * made for layout, made in zip(layouts, is_made, strict=True)]
        )
        zeros = int(ends[-1])
        self.starts = np.where(is_made, np.append(0, ends[:-1]), zeros).tolist()
        buffer = aligned(zeros + (0 if is_made.all() else by_width[NOTHING].nbytes))
        buffer[zeros:] = 0
        for key in np.flatnonzero(is_made).tolist():
            store = stores[self.widths[key]]
            store.read(*divmod(key, store.shape.num_experts), buffer[self.starts[key] :])
        self.buffer = buffer.to(device)
        self._start = self.buffer.data_ptr()
        self._views = [
            layout.views(self.buffer[start:])
            for layout, start in zip(layouts, self.starts, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        return self.buffer.numel()

    def views(self, key: int) -> dict[str, Packed | torch.Tensor]:
        """Projections and biases of one expert by name."""
        return self._views[key]

    def address(self, key: int) -> int:
        """The address of one expert."""
        return self._start + self.starts[key]
