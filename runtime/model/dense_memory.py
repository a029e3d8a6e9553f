"""The weights of a model outside its experts, together in one piece of memory, in huge pages where
there are any."""

from collections import defaultdict

import torch
from torch import nn

from runtime.devices import is_host
from runtime.model.huge_pages import HUGE_PAGE, anonymous, mode
from runtime.model.layout import round_up


def on_cpu(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have memory on the CPU; experts are on `meta`."""
    return [
        parameter
        for parameter in model.parameters()
        if is_host(parameter.device) and parameter.numel()
    ]


def gather(model: nn.Module) -> None:
    """Move the parameters on the CPU together, each aligned to 64 bytes. Parameters that share
    memory keep sharing it.

    Parameters that were read into huge pages and not converted since stay there. All stay where
    they are if there are no huge pages, or if they would not fill one. They are moved one by one,
    so that two copies of all are never held. Raises OSError.
    """
    of_storage = defaultdict(list)
    for parameter in on_cpu(model):
        if parameter.untyped_storage().data_ptr() % HUGE_PAGE:
            of_storage[parameter.untyped_storage().data_ptr()].append(parameter)
    sizes = [round_up(group[0].untyped_storage().nbytes()) for group in of_storage.values()]
    if mode() in ("never", "none") or sum(sizes) < HUGE_PAGE:
        return
    for address, place in zip(list(of_storage), anonymous(sum(sizes)).split(sizes), strict=True):
        _move(of_storage.pop(address), place)


def _move(group: list[nn.Parameter], place: torch.Tensor) -> None:
    """Move parameters of one storage to `place`, uint8."""
    # no larger than `place`
    old = group[0].untyped_storage()
    new = torch.from_numpy(place.numpy()).untyped_storage()
    place[: old.nbytes()].copy_(torch.empty(0, dtype=torch.uint8).set_(old))
    for parameter in group:
        like = parameter.storage_offset(), parameter.shape, parameter.stride()
        parameter.data = torch.empty(0, dtype=parameter.dtype).set_(new, *like)
