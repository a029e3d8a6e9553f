"""Reads that bypass the page cache, for experts that are more than memory will hold."""

import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from artifacts.errors import BadInput

_BLOCK = 4096  # bytes: offsets, lengths and addresses that every device accepts
_CHUNK = 256 << 10  # bytes of a read: what a core's cache holds until it is copied on

_bounce = threading.local()


class DirectFile:
    """One file open past the page cache, for as long as this object is there. Reads are positional and aligned, through
    a buffer of each thread's own.

    Raises BadInput where the file system or the platform has no such thing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except (OSError, AttributeError) as error:
            raise BadInput(f"{path} cannot be read past the page cache on this file system: use --link disk") from error
        weakref.finalize(self, os.close, self._descriptor)

    def read_into(self, offset: int, targets: Sequence[memoryview]) -> None:
        """Fill `targets` one after another with the bytes that follow `offset`; BadInput if the file ends before."""
        buffer = _own_buffer()
        for target in targets:
            done = 0
            while done < target.nbytes:
                begin = (offset + done) // _BLOCK * _BLOCK
                skipped = offset + done - begin
                length = min(_CHUNK, _rounded(skipped + target.nbytes - done))
                count = min(os.preadv(self._descriptor, [buffer[:length]], begin) - skipped, target.nbytes - done)
                if count <= 0:
                    raise BadInput(f"{self.path} ends before byte {offset}: it changed while in use, copy it again")
                target[done : done + count] = buffer[skipped : skipped + count]
                done += count
            offset += target.nbytes


def _own_buffer() -> memoryview:
    """[_CHUNK] bytes on a border of pages, this thread's."""
    if not hasattr(_bounce, "buffer"):
        _bounce.buffer = memoryview(mmap.mmap(-1, _CHUNK))
    return _bounce.buffer


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _BLOCK) * _BLOCK
