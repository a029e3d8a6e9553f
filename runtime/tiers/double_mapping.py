"""The memory of slots mapped twice: once slot after slot, once part after part.

A link fills a slot with an expert in one piece. A product over a batch of experts needs each matrix
next to the same matrix of the others, and would otherwise copy them. Where every part takes whole
pages, the two mappings serve both.
"""

import mmap
import os
from collections.abc import Sequence
from ctypes import CDLL, addressof, c_char, c_int, c_long, c_size_t, c_void_p

import torch

from runtime.model.files.direct_io import PAGE
from runtime.model.layout import Part

_AT_THIS_ADDRESS = 0x10  # MAP_FIXED of Linux, which Python's mmap lacks


def map_twice(
    num_slots: int, parts: Sequence[Part]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
    """Return new memory slot after slot, uint8 [num_slots * nbytes], and the same memory by the
    name of a part, uint8 [num_slots, nbytes of the part]. None where a part is not whole pages, and
    on systems without such mappings."""
    sizes = [part.nbytes for part in parts]
    nbytes = num_slots * sum(sizes)
    if (
        not nbytes
        or any(size % PAGE or size % mmap.PAGESIZE for size in sizes)
        or not hasattr(os, "memfd_create")
    ):
        return None
    try:
        with os.fdopen(os.memfd_create("moectl-slots"), "r+b", buffering=0) as file:
            file.truncate(nbytes)
            by_part = mmap.mmap(file.fileno(), nbytes)
            by_slot = mmap.mmap(-1, nbytes)
            _map_by_slot(by_slot, num_slots, sizes, file.fileno())
    except OSError:
        return None
    buffers = torch.frombuffer(by_part, dtype=torch.uint8).split(
        [num_slots * size for size in sizes]
    )
    by_name = {
        part.name: buffer.view(num_slots, part.nbytes)
        for part, buffer in zip(parts, buffers, strict=True)
    }
    return torch.frombuffer(by_slot, dtype=torch.uint8), by_name


def _map_by_slot(by_slot: mmap.mmap, num_slots: int, sizes: Sequence[int], descriptor: int) -> None:
    """Replace the pages of `by_slot` by the pages of a file that has part after part."""
    at_address = CDLL(None, use_errno=True).mmap
    at_address.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, c_long]
    at_address.restype = c_void_p
    address = addressof(c_char.from_buffer(by_slot))
    access = mmap.PROT_READ | mmap.PROT_WRITE
    for slot in range(num_slots):
        before = 0
        for size in sizes:
            offset = num_slots * before + slot * size
            mapped = at_address(
                address, size, access, mmap.MAP_SHARED | _AT_THIS_ADDRESS, descriptor, offset
            )
            if mapped != address:
                raise OSError("no room in the address space")
            address = address + size
            before = before + size
