"""Memory in pages of 2 MiB where the system gives them. With pages of 4 KiB one thread reads
weights at two thirds of the speed, because it looks up an address for each page.

Linux gives huge pages to memory that asks for them (`madvise`); /proc/self/smaps shows how many it
really gave.
"""

import mmap
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from ctypes import addressof, c_char
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch

from artifacts.hardware import numa

HUGE_PAGE = 2 << 20  # bytes: those of x86-64, and of ARM where small pages have 4 KiB
_IS_OFFERED = hasattr(mmap, "MADV_HUGEPAGE")  # only on Linux
_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPPINGS = Path("/proc/self/smaps")


class _Held(NamedTuple):
    """Mapping from address `start` to `stop`: its resident memory, and how much of that is in huge
    pages."""

    start: int
    stop: int
    resident_kib: int
    huge_kib: int


def anonymous(nbytes: int) -> torch.Tensor:
    """Return new memory of zeros, uint8 [nbytes], aligned to a page. From 2 MiB on it is aligned to
    2 MiB, and every part that fills a huge page lies in one where there are any. Its pages are
    spread over the nodes of a machine that has several. A page takes
    memory when it is first written, and returns it with the tensor. Raises OSError."""
    if nbytes < HUGE_PAGE or not _IS_OFFERED:
        return torch.frombuffer(_mapped(nbytes), dtype=torch.uint8)
    mapping = _mapped(nbytes + HUGE_PAGE)  # the bytes before the border stay unwritten
    first = -addressof(c_char.from_buffer(mapping)) % HUGE_PAGE
    # a kernel without huge pages: the memory is as good in small ones, and `shares` says so
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE, first, nbytes // HUGE_PAGE * HUGE_PAGE)
    numa.interleave(addressof(c_char.from_buffer(mapping, first)), nbytes, numa.several_nodes())
    return torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=first)


def mode() -> str:
    """Return when the system gives huge pages: `always`, `madvise` (to programs that ask), `never`;
    `none` where it has none."""
    chosen = re.search(r"\[(\w+)\]", _MODE.read_text()) if _MODE.exists() else None
    return chosen[1] if chosen else "none"


def shares(memory: Mapping[str, Iterable[torch.Tensor]]) -> dict[str, float | None]:
    """Return by name the share, from 0 to 1, of the resident memory of some CPU tensors that lies
    in huge pages; None where nothing was written yet. The system counts by mapping; a tensor may be
    part of one."""
    mappings = _read_mappings() if _MAPPINGS.exists() else []
    return {name: _share(tensors, mappings) for name, tensors in memory.items()}


def _mapped(nbytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, nbytes)
    return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _read_mappings() -> list[_Held]:
    """Return the mappings of this process, by address."""
    found = re.findall(
        r"(?m)^([0-9a-f]+)-([0-9a-f]+) |^(?:Rss|AnonHugePages): +(\d+)", _MAPPINGS.read_text()
    )
    entries = zip(found[::3], found[1::3], found[2::3], strict=True)
    return [
        _Held(int(start, 16), int(stop, 16), int(resident), int(huge))
        for (start, stop, _), (_, _, resident), (_, _, huge) in entries
    ]


def _share(tensors: Iterable[torch.Tensor], mappings: Sequence[_Held]) -> float | None:
    """Return the mean share of the mappings, each weighted by how much of the tensors it holds."""
    held: Counter[_Held] = Counter()  # bytes
    for tensor in tensors:
        start = tensor.data_ptr()
        stop = tensor.data_ptr() + tensor.nbytes
        first = bisect_right(mappings, start, key=attrgetter("stop"))
        behind = bisect_left(mappings, stop, key=attrgetter("start"))
        for mapping in mappings[first:behind]:
            held[mapping] += min(stop, mapping.stop) - max(start, mapping.start)
    weights = {mapping: min(nbytes, mapping.resident_kib << 10) for mapping, nbytes in held.items()}
    huge = sum(
        weight * mapping.huge_kib / mapping.resident_kib
        for mapping, weight in weights.items()
        if weight
    )
    return round(huge / sum(weights.values()), 3) if any(weights.values()) else None
