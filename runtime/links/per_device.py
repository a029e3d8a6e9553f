"""One link for each of several devices that share no memory: an expert comes over the link of its
own device."""

from collections.abc import Sequence

import torch

from artifacts.shape import FULL_BITS
from runtime.control.pools import Partitions
from runtime.links.link import Link, Transfer


class LinkPerDevice(Link):
    """A link for each device. A transfer concerns the link of its key alone; `clear`,
    `wait_for_copies` and `close` concern all links."""

    def __init__(self, partitions: Partitions, links: Sequence[Link]) -> None:
        self._partitions = partitions
        self._links = links
        self.kind = links[0].kind
        self.is_concurrent = links[0].is_concurrent
        self.is_queued = links[0].is_queued

    def issue(
        self, key: int, slot: torch.Tensor, *, urgency: int, bits: int = FULL_BITS
    ) -> Transfer:
        return self._link_of(key).issue(key, slot, urgency=urgency, bits=bits)

    def has_landed(self, transfer: Transfer) -> bool:
        return self._link_of(transfer.key).has_landed(transfer)

    def collect(self, transfer: Transfer) -> None:
        self._link_of(transfer.key).collect(transfer)

    def cancel(self, transfer: Transfer) -> None:
        self._link_of(transfer.key).cancel(transfer)

    def clear(self) -> None:
        for link in self._links:
            link.clear()

    def wait_for_copies(self) -> None:
        for link in self._links:
            link.wait_for_copies()

    def drain_stalls(self) -> float:
        """Return the sum over all links, which counts a wait for two links at once twice."""
        return sum([link.drain_stalls() for link in self._links])

    def conditions(self) -> dict[str, float | str]:
        """Return the conditions of the first link, and the measured rates of the others."""
        others = [link.conditions().get("measured_gbps") for link in self._links[1:]]
        rates = {
            f"measured_gbps_{number}": rate for number, rate in enumerate(others, start=1) if rate
        }
        return self._links[0].conditions() | rates

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _link_of(self, key: int) -> Link:
        return self._links[self._partitions.of(key)]
