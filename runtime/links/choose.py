"""The choice of the link between host memory or disk and the slots of a device."""

from collections.abc import Mapping
from typing import Protocol

import torch

from runtime.devices import is_host
from runtime.links.cuda import CudaLink
from runtime.links.link import DiskLink, ExpertSource, Link
from runtime.model.layout import ExpertStore
from runtime.model.open import MoeModel


class StoredSource(ExpertSource, Protocol):
    """A source over stores by bits, whose files may be in the page cache."""

    stores: Mapping[int, ExpertStore]


def default_kind(device: torch.device) -> str:
    """Return the link that `--link auto` stands for: `cuda` for a GPU, else `disk`."""
    return "disk" if is_host(device) else "cuda"


def open_link(
    opened: MoeModel,
    source: StoredSource,
    *,
    device: torch.device,
    is_pinned: bool = False,
    is_direct: bool = False,
) -> Link:
    """Return the link from a source, page-locked if `is_pinned`, to slots on a device. `is_direct`
    says that the source bypasses the page cache."""
    shape = opened.shape
    if is_host(device):
        return DiskLink(source, shape, kept=source.stores, is_direct=is_direct)
    nbytes = opened.store.layout.nbytes
    return CudaLink(source, shape, device=device, slot_nbytes=nbytes, is_pinned=is_pinned)
