"""Reads that bypass the page cache, for experts that are more than memory will hold."""

import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from ctypes import addressof, c_char
from pathlib import Path

from artifacts.errors import BadInput

PAGE = 4096  # bytes: offsets, lengths and addresses that every device accepts
_CHUNK = 1 << 20  # bytes of a read at most, by way of a buffer: a thread waits for every one of them

_bounce = threading.local()


class DirectFile:
    """One file open past the page cache, for as long as this object is there. Reads are positional and aligned: what
    begins on a border in the file and in memory comes straight to its place, all else through a buffer of each thread's
    own.

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
        for target in targets:
            done = self._read_straight(offset, target)
            while done < target.nbytes:
                begin = (offset + done) // PAGE * PAGE
                skipped = offset + done - begin
                buffer = _own_buffer(min(_CHUNK, _rounded(skipped + target.nbytes - done)))
                count = min(os.preadv(self._descriptor, [buffer], begin) - skipped, target.nbytes - done)
                if count <= 0:
                    raise BadInput(f"{self.path} ends before byte {offset}: it changed while in use, copy it again")
                target[done : done + count] = buffer[skipped : skipped + count]
                done += count
            offset += target.nbytes

    def _read_straight(self, offset: int, target: memoryview) -> int:
        """Bytes of `target` that the device has filled itself, whole blocks; none where it would not."""
        whole = target.nbytes // PAGE * PAGE
        if not whole or offset % PAGE or addressof(c_char.from_buffer(target)) % PAGE:
            return 0
        return os.preadv(self._descriptor, [target[:whole]], offset)


def _own_buffer(nbytes: int) -> memoryview:
    """So many bytes on a border of pages, this thread's."""
    if not hasattr(_bounce, "buffer") or len(_bounce.buffer) < nbytes:
        _bounce.buffer = memoryview(mmap.mmap(-1, nbytes))
    return _bounce.buffer[:nbytes]


def _rounded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
