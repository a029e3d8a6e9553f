"""Opens the tiers around the fast one: the slow tier, the link it is read over, and the near tier
beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from artifacts.shape import FULL_BITS
from runtime.control.pools import Partitions
from runtime.control.segments import Segments
from runtime.links.choose import open_link
from runtime.links.clock import Clock
from runtime.links.emulated import EmulatedLink
from runtime.links.link import Link
from runtime.links.per_device import LinkPerDevice
from runtime.model.layout import ExpertStore
from runtime.model.open import MoeModel
from runtime.policies.base import Split
from runtime.tiers.near import NearTier
from runtime.tiers.ram import RamStore
from runtime.tiers.replica_store import ReplicaStore
from runtime.tiers.slow import SlowTier
from runtime.tiers.slow_split import SegmentTier


@dataclass(frozen=True, slots=True)
class LinkChoice:
    """The link and the near tier that a user asked for.

    `kind` is `disk`, `cuda` or `emulated`. `bandwidth` and `near` are emulated rates in bytes per
    second. `is_direct` reads from disk past the page cache.
    """

    kind: str
    bandwidth: float = 0.0
    latency_s: float = 0.0
    near: float | None = None
    is_direct: bool = False


@dataclass(frozen=True, slots=True)
class Tiers:
    """`pinned_nbytes` is page-locked host memory; `bandwidth` is bytes per second of an emulated
    link, else None."""

    slow: SlowTier
    link: Link
    near: NearTier
    pinned_nbytes: int
    bandwidth: float | None

    def emulate_by(self, clock: Clock) -> None:
        """Move the emulated link and the emulated near tier by this clock."""
        assert isinstance(self.link, EmulatedLink), self.link
        self.link.clock = clock
        self.near.clock = clock


def open_tiers(
    opened: MoeModel,
    choice: LinkChoice,
    replicas: Mapping[int, ReplicaStore],
    *,
    split: Split | None = None,
    devices: Sequence[torch.device],
) -> Tiers:
    """Open the tiers of a choice, with `replicas` by bits, or with experts cut in two by `split`.

    Experts stay on disk with link `disk`; otherwise all are read into RAM, page-locked for a GPU.
    Each of `devices` that shares no memory with the others has a link of its own.
    """
    pin = choice.kind == "cuda"
    stores: dict[int, ExpertStore] = {FULL_BITS: opened.store, **replicas}
    if choice.is_direct:
        stores = {bits: store.direct() for bits, store in stores.items()}
        opened = replace(opened, store=stores[FULL_BITS])
    slow = _open_slow(opened, stores, split, in_ram=choice.kind != "disk", pin=pin)
    return Tiers(
        slow=slow,
        link=_open_links(opened, choice, slow, devices),
        near=NearTier(slow, bandwidth=choice.near),
        pinned_nbytes=sum(map(slow.nbytes, stores)) * opened.shape.num_keys if pin else 0,
        bandwidth=choice.bandwidth or None,
    )


def copied_to_ram(store: ExpertStore, *, pin: bool) -> RamStore:
    """Return a copy of the store in RAM, or the store itself where it is in RAM already and
    page-locked if `pin` asks for it."""
    is_there = store.buffer is not None and (store.is_pinned or not pin)
    return store if is_there else RamStore(store, pin=pin)


def _open_slow(
    opened: MoeModel,
    stores: Mapping[int, ExpertStore],
    split: Split | None,
    *,
    in_ram: bool,
    pin: bool,
) -> SlowTier:
    if split is not None:
        return SegmentTier.of(opened, Segments(opened.shape, split), in_ram=in_ram, pin=pin)
    return SlowTier(
        {bits: copied_to_ram(store, pin=pin) for bits, store in stores.items()}
        if in_ram
        else stores
    )


def _open_links(
    opened: MoeModel, choice: LinkChoice, slow: SlowTier, devices: Sequence[torch.device]
) -> Link:
    if len(set(devices)) == 1 or choice.kind == "emulated":
        return _open_link(opened, choice, slow, devices[0])
    partitions = Partitions(opened.shape.num_experts, len(devices))
    return LinkPerDevice(
        partitions, [_open_link(opened, choice, slow, device) for device in devices]
    )


def _open_link(opened: MoeModel, choice: LinkChoice, slow: SlowTier, device: torch.device) -> Link:
    if choice.kind == "emulated":
        return EmulatedLink(
            slow, opened.shape, bandwidth=choice.bandwidth, latency_s=choice.latency_s
        )
    is_pinned = choice.kind == "cuda"
    return open_link(opened, slow, device=device, is_pinned=is_pinned, is_direct=choice.is_direct)
