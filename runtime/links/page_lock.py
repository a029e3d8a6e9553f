"""Page-locks memory that exists: a GPU's driver locks its pages, and can then copy from them and
read them in kernels."""

import weakref

import torch

from artifacts.common.host_memory import host_memory
from artifacts.errors import OutOfResources

# cudaHostRegister's flags: for every device, and readable from kernels
_PORTABLE = 1
_MAPPED = 2
# of the memory that is available: with all of it the system would swap, or end the process
_SHARE = 0.95
_PAGE = 4096  # bytes


def check_budget(nbytes: int) -> None:
    """Raise OutOfResources where this machine has no room to page-lock `nbytes` bytes."""
    available = int(_SHARE * host_memory()[1])
    if nbytes > available:
        raise OutOfResources(
            f"the experts would take {nbytes / 2**30:.2f} GiB of page-locked memory, and "
            f"{available / 2**30:.2f} GiB are available: leave them on disk with --link disk"
        )


class PageLock:
    """Locks the pages of `buffer`, uint8 on the CPU, step by step; all are unlocked once `owner` is
    gone.

    The pages must have been written before, so that the driver need not make them one by one.
    torch's own page-locked memory is one block that it rounds up to a power of two.
    """

    def __init__(self, buffer: torch.Tensor, owner: object) -> None:
        self._start = buffer.data_ptr()
        self._end = buffer.data_ptr() + buffer.nbytes
        self._locked_to = self._start
        self._parts: list[int] = []
        weakref.finalize(owner, _unlock, self._parts).atexit = False

    def lock_to(self, nbytes: int) -> None:
        """Lock the rest of the first `nbytes` bytes that is not locked yet, in whole pages; at the
        end also the last page. Raises OutOfResources."""
        stop = self._start + nbytes
        stop = self._end if stop >= self._end else stop - (stop - self._start) % _PAGE
        if stop == self._locked_to:
            return
        size = stop - self._locked_to
        error = int(
            torch.cuda.cudart().cudaHostRegister(self._locked_to, size, _PORTABLE | _MAPPED)
        )
        if error:
            done, whole = (at - self._start for at in (self._locked_to, self._end))
            raise OutOfResources(
                f"the driver page-locked {done / 2**30:.2f} of {whole / 2**30:.2f} GiB of experts "
                f"and no more (CUDA error {error}): leave them on disk with --link disk"
            )
        self._parts.append(self._locked_to)
        self._locked_to = stop


def _unlock(parts: list[int]) -> None:
    for part in parts:
        torch.cuda.cudart().cudaHostUnregister(part)
