"""Loops over numpy arrays, compiled by numba. Importing this module imports numba: import it where it is used."""

import pickle
import warnings
from collections.abc import Callable
from functools import cache

from numba import njit

# Sums may be taken in any order: otherwise they would not use the vector unit.
_FASTMATH = frozenset({"reassoc", "contract"})

part = njit(fastmath=set(_FASTMATH))
"""Decorates a function that kernels of the same file call; it is compiled as part of them."""

exact_part = njit
"""As `part`, for kernels that are `exact`."""


def kernel(signature: str | list[str], *, nogil: bool = False, exact: bool = False) -> Callable[[Callable], Callable]:
    """Compile for this signature, or these signatures, at import and cache the result beside the source or in the
    user's cache folder.

    `nogil` releases the GIL for loops that run longer than other threads should wait. `exact` keeps the order of
    operations and the rounding of plain Python, for results that others must be able to recompute. Where no cache can
    be written or read, the function is compiled anew in every process, with one warning for all functions.
    """
    fastmath = False if exact else set(_FASTMATH)

    def compiled(function: Callable) -> Callable:
        try:
            return njit(signature, cache=True, nogil=nogil, fastmath=fastmath)(function)
        except (RuntimeError, OSError, EOFError, pickle.PickleError):  # no folder; or a damaged file, as of a power cut
            _warn()
            return njit(signature, nogil=nogil, fastmath=fastmath)(function)

    return compiled


@cache
def _warn() -> None:
    warnings.warn(
        "compiled code cannot be kept, so that every start compiles it anew: set NUMBA_CACHE_DIR to an empty folder "
        "that can be written",
        stacklevel=1,
    )
