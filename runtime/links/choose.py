"""The choice of the link between host memory or disk and the slots of a device."""

from collections.abc import Mapping

import torch

from artifacts.shape import Shape
from runtime.devices import is_host
from runtime.links.cuda import CudaLink
from runtime.links.disk import DiskLink
from runtime.links.link import ExpertSource, Link
from runtime.model.layout import ExpertStore


def default_kind(device: torch.device) -> str:
    """Return the link that `--link auto` stands for: `cuda` for a GPU, else `disk`."""
    return "disk" if is_host(device) else "cuda"


def open_link(
    source: ExpertSource,
    shape: Shape,
    *,
    kept: Mapping[int, ExpertStore],
    device: torch.device,
    slot_nbytes: int,
    is_pinned: bool,
    is_direct: bool = False,
) -> Link:
    """Return the link from a source, page-locked if `is_pinned`, to slots on a device. `kept` has
    the stores whose files may be in the page cache, by bits; `is_direct` says that the source
    bypasses it."""
    if is_host(device):
        return DiskLink(source, shape, kept=kept, is_direct=is_direct)
    return CudaLink(source, shape, device=device, slot_nbytes=slot_nbytes, is_pinned=is_pinned)
