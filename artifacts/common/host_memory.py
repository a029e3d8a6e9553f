"""Bytes of RAM, in all and available, and the cores that this process may use."""

import os
from pathlib import Path

_CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_SYSTEM = Path("/proc/meminfo")


def host_memory() -> tuple[int, int]:
    """Return the bytes of RAM and those available, both within the container's limit."""
    whole = (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    )
    fields = (line.split() for line in lines_of(_SYSTEM))
    available = next(
        (int(field[1]) * 1024 for field in fields if field[0] == "MemAvailable:"), whole
    )
    limits = [int(text) for path in _CGROUP for text in lines_of(path) if text.strip().isdecimal()]
    limit = min([whole, *limits])
    return limit, min(available, limit)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file, none where it does not exist, as on other systems."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
