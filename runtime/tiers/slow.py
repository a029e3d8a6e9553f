"""The slow tier: every expert at every precision, as links and the near tier read it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from artifacts.errors import BadInput
from artifacts.shape import FULL_BITS
from runtime.control.plan import Place
from runtime.kernels.batched import BatchedExperts, SequentialExperts, choose_batched
from runtime.kernels.replica_linear import project_replica
from runtime.model.layout import ExpertStore
from runtime.model.open import MoeModel


@dataclass(frozen=True, slots=True)
class SlowTier:
    """`stores` by bits, full precision among them; each on disk or in RAM. `is_split` where experts
    are cut in segments."""

    stores: Mapping[int, ExpertStore]
    is_split: ClassVar[bool] = False

    @classmethod
    def plain(cls, store: ExpertStore) -> "SlowTier":
        """A slow tier of full precision only."""
        return cls({FULL_BITS: store})

    def read(self, layer: int, expert: int, out: torch.Tensor, *, bits: int = FULL_BITS) -> None:
        """Copy one replica to the start of `out`, uint8 on the CPU. Raises BadInput where it cannot
        be read."""
        try:
            self.stores[bits].read(layer, expert, out)
        except OSError as error:
            raise unreadable(layer, expert, error) from error

    def check_unchanged(self) -> None:
        """Raise BadInput if a file that experts are read from was written into since it was
        opened."""
        for store in self.stores.values():
            store.check_unchanged()

    def view(self, layer: int, expert: int, *, bits: int = FULL_BITS) -> torch.Tensor | None:
        """Return the replica's bytes where they lie in RAM; None where it is on disk."""
        return self.stores[bits].view(layer, expert)

    def nbytes(self, bits: int) -> int:
        """Return the bytes of one replica."""
        return self.stores[bits].layout.nbytes

    def num_bytes(self, place: Place) -> int:
        """Return the bytes of the replica that a place names."""
        return self.nbytes(place.bits)

    def weights(self, place: Place, buffer: torch.Tensor) -> dict[str, object]:
        """Return views of the replica at the start of `buffer`, as `expert_forward` takes them with
        `projection`."""
        return self.stores[place.bits].layout.views(buffer)

    def together(self, opened: MoeModel) -> BatchedExperts | SequentialExperts | None:
        """Return a way to compute several experts of one token in one call, where that is faster
        and gives the same bits; otherwise None."""
        return choose_batched(opened)

    def projection(self, bits: int) -> Callable[..., torch.Tensor]:
        """Return the function that multiplies by an expert at this number of bits, from here or
        from a replica in the fast tier."""
        return self.stores[FULL_BITS].layout.project if bits == FULL_BITS else project_replica


def unreadable(layer: int, expert: int, error: OSError) -> BadInput:
    """Return the error that a user sees for an error of the disk."""
    return BadInput(
        f"layer {layer}, expert {expert} cannot be read ({error.strerror or error}): check the disk"
    )
