"""Which devices a run computes on."""

import re

import torch

from artifacts.errors import BadUsage
from runtime.model.open import MoeModel


def devices_for(opened: MoeModel, count: int) -> tuple[torch.device, ...]:
    """What experts are spread over: the model's own device and other GPUs, or where there are fewer than `count`, parts
    of its own. Raises BadUsage for experts that cannot be computed elsewhere."""
    found = spread_over(opened.model.device, count)
    if len(set(found)) > 1 and getattr(opened.layers[0].experts, "has_post_expert_norm", False):
        raise BadUsage(f"experts of {opened.family} share a norm, which is on one GPU: leave out --devices")
    return found


def spread_over(first: torch.device, count: int) -> tuple[torch.device, ...]:
    """The same, of any model whose own device is the first."""
    if first.type != "cuda" or torch.cuda.device_count() < count:
        return (first,) * count
    others = (torch.device("cuda", number) for number in range(torch.cuda.device_count()))
    return (first, *[other for other in others if other.index != (first.index or 0)][: count - 1])


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises BadUsage for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise BadUsage(f"device {name!r} is not known: use auto, cpu, cuda or cuda:1")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadUsage(f"{name} is not among the {torch.cuda.device_count()} visible CUDA devices: use --device cpu")
    return device
