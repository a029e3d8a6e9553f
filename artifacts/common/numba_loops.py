"""Loops over numpy arrays, compiled by numba. Importing this module imports numba: import it where it is used."""

import warnings
from collections.abc import Callable

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
    be written, the function is compiled anew in every process, with a warning.
    """
    fastmath = False if exact else set(_FASTMATH)

    def compiled(function: Callable) -> Callable:
        try:
            return njit(signature, cache=True, nogil=nogil, fastmath=fastmath)(function)
        except (RuntimeError, OSError) as error:
            warnings.warn(f"compiled code cannot be kept, so that every start takes longer: {error}", stacklevel=2)
            return njit(signature, nogil=nogil, fastmath=fastmath)(function)

    return compiled
