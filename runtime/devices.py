"""The devices that a run computes on: their choice, and what differs between a CPU and a GPU."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from artifacts.common.host_memory import host_memory
from artifacts.errors import BadUsage


def resolve_device(name: str) -> torch.device:
    """The device of a `--device` option; `auto` is CUDA where there is a GPU, else the CPU. Raises
    BadUsage for a name that is not understood and for a GPU that is not visible."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise BadUsage(f"device {name!r} is not known: use auto, cpu, cuda or cuda:1")
    device = torch.device(name)
    if not is_host(device) and (device.index or 0) >= torch.cuda.device_count():
        raise BadUsage(
            f"{name} is not among the {torch.cuda.device_count()} visible CUDA devices: use "
            "--device cpu"
        )
    return device


def spread_over(first: torch.device, count: int) -> tuple[torch.device, ...]:
    """Return `first` and other visible GPUs, `count` in all. Where there are fewer, return `first`
    `count` times, each time as a part of it."""
    if is_host(first) or torch.cuda.device_count() < count:
        return (first,) * count
    others = (torch.device("cuda", number) for number in range(torch.cuda.device_count()))
    return (first, *[other for other in others if other.index != (first.index or 0)][: count - 1])


def is_host(device: torch.device) -> bool:
    """Return whether the device is the CPU: its memory is RAM, and it computes at once."""
    return device.type == "cpu"


def kind_of(device: torch.device) -> str:
    """Return the name of all devices of this kind, `cpu` or `cuda`."""
    return device.type


def gpu_of(device: torch.device) -> tuple[str, int] | None:
    """Return the name and the bytes of a GPU; None of the CPU."""
    if is_host(device):
        return None
    return torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory


def free_nbytes(device: torch.device) -> int:
    """Return the bytes of a device's memory that are free; on a CPU those of RAM."""
    return host_memory()[1] if is_host(device) else torch.cuda.mem_get_info(device)[0]


def made_current(device: torch.device) -> AbstractContextManager:
    """Make `device` the current one: Triton launches kernels there, wherever their operands lie."""
    return nullcontext() if is_host(device) else torch.cuda.device(device)


def run_there(
    device: torch.device, function: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Return the function with `device` made the current one while it runs."""
    if is_host(device):
        return function

    def run(*arguments: object) -> torch.Tensor:
        with torch.cuda.device(device):
            return function(*arguments)

    return run


def has_graphs(device: torch.device) -> bool:
    """Return whether work that is queued on the device can be captured."""
    return not is_host(device)


def compiles_late(device: torch.device) -> bool:
    """Return whether the device's kernels are compiled, or loaded, when they are first used."""
    return not is_host(device)


def wait_for_compute(device: torch.device) -> None:
    """Wait until the work that was queued on the device's current stream is done."""
    if not is_host(device):
        torch.cuda.current_stream(device).synchronize()


def wait_for_all(device: torch.device) -> None:
    """Wait until the work on all streams of the device is done, copies too."""
    if not is_host(device):
        torch.cuda.synchronize(device)
