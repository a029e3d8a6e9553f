"""Keeps freed memory from staying with the process, where the C library is one that holds on to it."""

import ctypes

_M_MMAP_THRESHOLD = -3  # of glibc's mallopt
_LARGE = 1 << 20  # bytes


def return_large_buffers() -> None:
    """From now on large buffers go back to the operating system when they are freed.

    glibc otherwise learns to keep what a thread has freed, for that thread alone: with a thread per batch that came to
    several times what was in use. Other C libraries have no such switch and need none.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
