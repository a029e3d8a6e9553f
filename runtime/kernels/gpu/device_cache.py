"""Cache of the layers' experts as a device keeps it, for the kernels of
`runtime.kernels.gpu.decide`."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

# numbers that are told of a layer: without prefetching, and with it
ON_DEMAND = 3
AHEAD = 6


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """Slots of every layer and their experts, in device memory.

    `table` [L, E] is the slot of each expert in its layer, `owner` [L, S] the expert of each slot,
    below 0 for none. The resident of a layer with the least `stamp` [L, E] is evicted. `kind` says
    what stamps are. With "last use", `resolve` writes `clock` [1] there, which the caller moves on
    from token to token. With "uses" it counts uses. With "turns" only the caller writes them, from
    0 on.

    `unused` [L, E] is 1 for experts that were prefetched and not used since; `left` [L, E] is the
    clock when a prefetch last evicted an expert. `told` [N, L] counts the loads and evictions of
    each layer. With prefetching it then counts the experts prefetched, the evicted experts that
    were unused, and the loaded experts that had been evicted in the same token; and last, always,
    the experts wanted. With "turns" the experts of the last token [L, K] follow, the first of a
    pass. All are int32.

    A layer uses the first of its S places, as many as `num_slots` says: at least as many as a token
    has experts."""

    table: torch.Tensor
    owner: torch.Tensor
    stamp: torch.Tensor
    unused: torch.Tensor
    left: torch.Tensor
    clock: torch.Tensor
    told: torch.Tensor
    num_slots: Sequence[int]
    kind: str

    @classmethod
    def holding(
        cls,
        table: torch.Tensor,
        owner: torch.Tensor,
        stamp: torch.Tensor,
        unused: torch.Tensor,
        *,
        num_slots: Sequence[int],
        kind: str,
        num_told: int,
    ) -> "DeviceCache":
        """Return a cache with the contents of these tensors, with its clock and its counts at 0;
        `num_told` numbers are told of each layer."""
        left = torch.zeros_like(stamp)
        clock = table.new_zeros(1)
        told = table.new_zeros(num_told * len(table))
        return cls(table, owner, stamp, unused, left, clock, told, num_slots, kind)

    def hold(self, *tables: torch.Tensor) -> None:
        """Take over the contents of these tensors, given as to `holding`, at the same addresses,
        with clock and counts at 0."""
        for field, new in zip(fields(self), tables, strict=False):
            getattr(self, field.name).copy_(new)
        for own in (self.left, self.clock, self.told):
            own.zero_()

    def kept(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tensors that outlive the cache: `owner`, `stamp` and `unused`."""
        return self.owner, self.stamp, self.unused
