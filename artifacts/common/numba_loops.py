"""Loops over numpy arrays, compiled by numba. Whoever imports this module imports numba: do so where it is needed."""

import warnings
from collections.abc import Callable

from numba import njit

# Sums may be taken in any order, or they would not use the vector unit.
_FASTMATH = frozenset({"reassoc", "contract"})

part = njit(fastmath=set(_FASTMATH))
"""A function that kernels of the same file call: compiled as part of them."""

exact_part = njit
"""The same for kernels that are `exact`."""


def kernel(signature: str | list[str], *, nogil: bool = False, exact: bool = False) -> Callable[[Callable], Callable]:
    """Compile for this signature alone, or these, as the module is imported, and keep the result beside the source or
    in the user's cache folder. `nogil` lets other threads run meanwhile, for what takes longer than they would wait.
    `exact` rounds as plain Python does, in its order, for what others must be able to recompute.

    Where neither can be written numba refuses; then it is compiled anew in every process, and a warning says so.
    """
    fastmath = False if exact else set(_FASTMATH)

    def compiled(function: Callable) -> Callable:
        try:
            return njit(signature, cache=True, nogil=nogil, fastmath=fastmath)(function)
        except (RuntimeError, OSError) as error:
            warnings.warn(f"compiled code cannot be kept, so that every start takes longer: {error}", stacklevel=2)
            return njit(signature, nogil=nogil, fastmath=fastmath)(function)

    return compiled
