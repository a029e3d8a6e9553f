"""A link for each of several devices that share no memory: an expert comes over that of the device it belongs to."""

from collections.abc import Sequence

import torch

from artifacts.shape import FULL_BITS
from runtime.control.devices import Partitions
from runtime.links.link import Link, Transfer


class ManyLinks:
    """`links` by device. What waits, waits for its own link; to drop, settle or close is done to all."""

    def __init__(self, partitions: Partitions, links: Sequence[Link]) -> None:
        self._partitions, self._links = partitions, links
        self.kind, self.side_by_side = links[0].kind, links[0].side_by_side

    def issue(self, key: int, slot: torch.Tensor, *, urgency: int, bits: int = FULL_BITS) -> Transfer:
        return self._of(key).issue(key, slot, urgency=urgency, bits=bits)

    def has_landed(self, transfer: Transfer) -> bool:
        return self._of(transfer.key).has_landed(transfer)

    def collect(self, transfer: Transfer) -> None:
        self._of(transfer.key).collect(transfer)

    def cancel(self, transfer: Transfer) -> None:
        self._of(transfer.key).cancel(transfer)

    def drop(self) -> None:
        for link in self._links:
            link.drop()

    def settle(self) -> None:
        for link in self._links:
            link.settle()

    def drain_stalls(self) -> float:
        """Of all together: where two wait at once, both are counted."""
        return sum([link.drain_stalls() for link in self._links])

    def conditions(self) -> dict[str, float | str]:
        """The first one's, and what the others moved."""
        others = [link.conditions().get("measured_gbps") for link in self._links[1:]]
        moved = {f"measured_gbps_{number}": rate for number, rate in enumerate(others, start=1) if rate}
        return self._links[0].conditions() | moved

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _of(self, key: int) -> Link:
        return self._links[self._partitions.of(key)]
