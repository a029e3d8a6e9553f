"""A folder that cannot be written into, for root too."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VERSION = 0x20080522  # of capget and capset, with two words a set
_DAC_OVERRIDE = 1 << 1  # by which root writes where permissions forbid it


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Take away write permission of the folder and its files, and root's right to pass over it from
    this thread and those that it starts."""
    paths = [folder, *folder.iterdir()]
    modes = [path.stat().st_mode for path in paths]
    for path in paths:
        path.chmod(path.stat().st_mode & ~0o222)
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, sets) == 0, os.strerror(ctypes.get_errno())
    effective = sets[0]
    sets[0] &= ~_DAC_OVERRIDE
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        sets[0] = effective
        assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())
        for path, mode in zip(paths, modes, strict=True):
            path.chmod(mode)
