"""Reads that bypass the page cache, for experts that do not all fit into memory."""

import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from ctypes import addressof, c_char
from pathlib import Path

from artifacts.errors import BadInput

PAGE = 4096  # bytes: the alignment of offsets, lengths and addresses that every device accepts
_CHUNK = 1 << 20  # bytes of a read through a buffer, at most

_bounce = threading.local()


class DirectFile:
    """One file opened with O_DIRECT, for the lifetime of this object; reads are positional.

    Bytes that are page-aligned both in the file and in memory are read in place; all others go
    through a buffer of the calling thread. Raises BadInput where the file system or the platform
    has no direct reads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except (OSError, AttributeError) as error:
            raise BadInput(
                f"{path} cannot be read past the page cache on this file system: use --link disk"
            ) from error
        weakref.finalize(self, os.close, self._descriptor)

    def read_into(self, offset: int, targets: Sequence[memoryview]) -> None:
        """Fill `targets` one after another with the bytes that follow `offset`; BadInput if the
        file ends before."""
        for target in targets:
            done = self._read_straight(offset, target)
            while done < target.nbytes:
                begin = (offset + done) // PAGE * PAGE
                skipped = offset + done - begin
                buffer = _thread_buffer(min(_CHUNK, _rounded(skipped + target.nbytes - done)))
                count = min(
                    os.preadv(self._descriptor, [buffer], begin) - skipped, target.nbytes - done
                )
                if count <= 0:
                    raise BadInput(
                        f"{self.path} ends before byte {offset}: it changed while in use, copy it "
                        "again"
                    )
                target[done : done + count] = buffer[skipped : skipped + count]
                done += count
            offset += target.nbytes

    def _read_straight(self, offset: int, target: memoryview) -> int:
        """Read the whole pages of `target` in place and return their bytes; 0 if it or the offset
        is not aligned."""
        whole = target.nbytes // PAGE * PAGE
        if not whole or offset % PAGE or addressof(c_char.from_buffer(target)) % PAGE:
            return 0
        return os.preadv(self._descriptor, [target[:whole]], offset)


def _thread_buffer(nbytes: int) -> memoryview:
    """Return this thread's page-aligned buffer, [nbytes]."""
    if not hasattr(_bounce, "buffer") or len(_bounce.buffer) < nbytes:
        _bounce.buffer = memoryview(mmap.mmap(-1, nbytes))
    return _bounce.buffer[:nbytes]


def _rounded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
