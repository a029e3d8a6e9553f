"""The devices that a run computes on: their choice, and what differs between a CPU and a GPU."""

import re

import torch

from artifacts.errors import BadUsage


def resolve_device(name: str) -> torch.device:
    """The device of a `--device` option; `auto` is CUDA where there is a GPU, else the CPU. Raises
    BadUsage for a name that is not understood and for a GPU that is not visible."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise BadUsage(f"device {name!r} is not known: use auto, cpu, cuda or cuda:1")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadUsage(
            f"{name} is not among the {torch.cuda.device_count()} visible CUDA devices: use "
            "--device cpu"
        )
    return device


def spread_over(first: torch.device, count: int) -> tuple[torch.device, ...]:
    """Return `first` and other visible GPUs, `count` in all. Where there are fewer, return `first`
    `count` times, each time as a part of it."""
    if first.type != "cuda" or torch.cuda.device_count() < count:
        return (first,) * count
    others = (torch.device("cuda", number) for number in range(torch.cuda.device_count()))
    return (first, *[other for other in others if other.index != (first.index or 0)][: count - 1])
