"""Rates of a device for reads by themselves, and of memory for copies: loads of experts are
compared with them."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from artifacts.errors import BadInput
from runtime.links.link import READS_IN_FLIGHT, READS_PAST_CACHE
from runtime.model.files.checkpoint import File
from runtime.model.files.direct_io import DirectFile
from runtime.model.layout import aligned

_PIECE = 1 << 20  # bytes at a time into the page cache
_APART = 16  # copies before a buffer is used again, so that it has left the processor's caches


class Place(NamedTuple):
    """Contiguous bytes of a file."""

    path: Path
    offset: int
    nbytes: int


class PlainFile:
    """A file opened for positional reads, without anything that moectl adds."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read_into(self, offset: int, targets: Sequence[memoryview]) -> None:
        (target,) = targets
        done = 0
        while done < len(target):
            done += os.preadv(self._descriptor, [target[done:]], offset + done)

    def __del__(self) -> None:
        os.close(self._descriptor)


def cached_rate(places: Sequence[Place]) -> float:
    """Return the bytes per second of these reads by themselves through the page cache, with as many
    in flight as moectl's link has."""
    return _rate(places, PlainFile, READS_IN_FLIGHT)


def direct_rate(places: Sequence[Place]) -> float:
    """Return the bytes per second of these reads by themselves past the page cache; 0 where the
    file system has no direct reads."""
    try:
        return _rate(places, DirectFile, READS_PAST_CACHE)
    except BadInput:
        return 0.0


def keep(places: Sequence[Place]) -> None:
    """Have these bytes in the page cache."""
    buffer = memoryview(bytearray(_PIECE))
    files = {path: PlainFile(path) for path in {place.path for place in places}}
    for path, offset, nbytes in places:
        for start in range(0, nbytes, _PIECE):
            files[path].read_into(offset + start, [buffer[: nbytes - start]])


def copy_rate(piece_nbytes: int, num_pieces: int) -> float:
    """Return the bytes per second of one thread that copies `num_pieces` pieces from memory to
    memory."""
    source, target = (aligned(_APART * piece_nbytes).view(_APART, -1) for _ in range(2))
    source.fill_(1)
    target.fill_(2)
    begin_s = time.perf_counter()
    for number in range(num_pieces):
        target[number % _APART].copy_(source[number % _APART])
    return num_pieces * piece_nbytes / (time.perf_counter() - begin_s)


def _rate(places: Sequence[Place], opened: Callable[[Path], File], in_flight: int) -> float:
    files = {path: opened(path) for path in {place.path for place in places}}
    largest = max(place.nbytes for place in places)
    buffers = [memoryview(aligned(largest).numpy()) for _ in range(in_flight)]

    def read(place: Place) -> None:
        buffer = buffers.pop()
        files[place.path].read_into(place.offset, [buffer[: place.nbytes]])
        buffers.append(buffer)

    with ThreadPoolExecutor(in_flight) as threads:
        begin_s = time.perf_counter()
        list(threads.map(read, places))
        return sum(place.nbytes for place in places) / (time.perf_counter() - begin_s)
