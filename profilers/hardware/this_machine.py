"""The machine that this process runs on: the properties that measurements depend on."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

_CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """`cores` are those that this process may use, `memory_nbytes` is RAM or the container's limit, `locked_nbytes` the
    limit of page-locked memory or None, `load` the number of processes that ran or waited in the last minute, None
    where the system does not count them."""

    processor: str
    cores: int
    threads: int
    memory_nbytes: int
    available_nbytes: int
    locked_nbytes: int | None
    load: float | None
    gpu: str | None
    gpu_nbytes: int

    @classmethod
    def look(cls, device: torch.device) -> "LocalMachine":
        """Observe the machine now; `device` is the one that computes."""
        on_cuda = device.type == "cuda"
        memory, available = _memory()
        return cls(
            processor=_processor(),
            cores=num_cores(),
            threads=torch.get_num_threads(),
            memory_nbytes=memory,
            available_nbytes=available,
            locked_nbytes=_locked(),
            load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            gpu=torch.cuda.get_device_name(device) if on_cuda else None,
            gpu_nbytes=torch.cuda.get_device_properties(device).total_memory if on_cuda else 0,
        )


def num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _memory() -> tuple[int, int]:
    """Return the bytes of RAM and those available, both within the container's limit."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    fields = (line.split() for line in _lines(Path("/proc/meminfo")))
    available = next((int(field[1]) * 1024 for field in fields if field[0] == "MemAvailable:"), whole)
    limits = [int(text) for path in _CGROUP for text in _lines(path) if text.strip().isdecimal()]
    limit = min([whole, *limits])
    return limit, min(available, limit)


def _locked() -> int | None:
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, none where it does not exist, as on other systems."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
