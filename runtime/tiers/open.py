"""The tiers around the fast one: where experts live, the link they come over, the near tier beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from artifacts.errors import BadUsage
from artifacts.shape import FULL_BITS
from runtime.control.devices import Partitions
from runtime.control.segments import Segments
from runtime.links.cuda import CudaLink
from runtime.links.disk import DiskLink
from runtime.links.emulated import EmulatedLink
from runtime.links.link import Link
from runtime.links.per_device import ManyLinks
from runtime.model.expert_store import DiskStore
from runtime.model.open import MoeModel
from runtime.policies.base import Split
from runtime.tiers.near import NearTier
from runtime.tiers.ram import RamStore
from runtime.tiers.replicas import ReplicaStore
from runtime.tiers.slow import SlowTier
from runtime.tiers.slow_split import SegmentTier


@dataclass(frozen=True, slots=True)
class Tiers:
    """`pinned_nbytes` of page-locked host memory; `bandwidth`: bytes per second of an emulated link, else None."""

    slow: SlowTier
    link: Link
    near: NearTier
    pinned_nbytes: int
    bandwidth: float | None


@dataclass(frozen=True, slots=True)
class LinkChoice:
    """What a user said of link and near tier: kind `disk`, `cuda` or `emulated`, and the rates of emulation;
    `is_direct`: from disk past the page cache."""

    kind: str
    bandwidth: float = 0.0
    latency_s: float = 0.0
    near: float | None = None
    is_direct: bool = False


def open_tiers(
    opened: MoeModel,
    choice: LinkChoice,
    replicas: Mapping[int, ReplicaStore],
    *,
    split: Split | None = None,
    devices: Sequence[torch.device],
) -> Tiers:
    """Open what was chosen, with `replicas` by bits, or with experts cut in two by `split`. All are read into RAM,
    page-locked for a GPU, unless they stay on disk. Each of `devices` that shares no memory with the others has a link
    of its own."""
    on_disk, pin = choice.kind == "disk", choice.kind == "cuda"
    stores: dict[int, DiskStore | ReplicaStore] = {FULL_BITS: opened.store, **replicas}
    if choice.is_direct:
        stores = {bits: direct(store) for bits, store in stores.items()}
        opened = replace(opened, store=stores[FULL_BITS])
    if split is not None:
        slow = SegmentTier.of(opened, Segments(opened.shape, split), in_ram=not on_disk, pin=pin)
    else:
        slow = SlowTier(stores if on_disk else {bits: in_ram(store, pin=pin) for bits, store in stores.items()})
    return Tiers(
        slow=slow,
        link=_open_links(opened, choice, slow, devices),
        near=NearTier(slow, bandwidth=choice.near),
        pinned_nbytes=sum(map(slow.nbytes, stores)) * opened.shape.num_keys if pin else 0,
        bandwidth=choice.bandwidth or None,
    )


def in_ram(store: DiskStore | ReplicaStore | RamStore, *, pin: bool) -> RamStore:
    """Copied, unless it is there already."""
    return store if isinstance(store, RamStore) and (store.is_pinned or not pin) else RamStore(store, pin=pin)


def _open_links(opened: MoeModel, choice: LinkChoice, slow: SlowTier, devices: Sequence[torch.device]) -> Link:
    if len(set(devices)) == 1 or choice.kind == "emulated":
        return _open_link(opened, choice, slow, devices[0])
    partitions = Partitions(opened.shape.num_experts, len(devices))
    return ManyLinks(partitions, [_open_link(opened, choice, slow, device) for device in devices])


def _open_link(opened: MoeModel, choice: LinkChoice, slow: SlowTier, device: torch.device) -> Link:
    shape = opened.shape
    if choice.kind == "emulated":
        return EmulatedLink(slow, shape, bandwidth=choice.bandwidth, latency_s=choice.latency_s)
    if device.type == "cuda":
        is_pinned, nbytes = choice.kind == "cuda", opened.store.layout.nbytes
        return CudaLink(slow, shape, device=device, slot_nbytes=nbytes, is_pinned=is_pinned)
    return DiskLink(slow, shape, kept=slow, is_direct=choice.is_direct)


def direct(store: DiskStore | ReplicaStore) -> DiskStore:
    """The same, past the page cache. Raises BadUsage for replicas, BadInput where the file system cannot."""
    if not isinstance(store, DiskStore):
        raise BadUsage("--link direct reads a checkpoint past the page cache, and replicas come through it: use disk")
    return store.direct()
