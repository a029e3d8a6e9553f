"""Loops over numpy arrays, compiled by numba. Importing this module imports numba: import it where
it is used."""

import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache, cached_property

import numpy as np
from numba import config, njit, typeof, types
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target
from numba.core.sigutils import normalize_signature
from numba.core.typing import Signature
from numba.extending import models, register_model

from artifacts.common.numba_calls import callable_by_name
from artifacts.common.sources import digest

# Sums may be taken in any order: otherwise they would not use the vector unit.
_FASTMATH = frozenset({"reassoc", "contract"})
_NOT_KEPT = (RuntimeError, OSError, EOFError, AttributeError, pickle.PickleError)
"""Errors that show that code cannot be kept or found again: no folder, a damaged file, as after a
power cut, or another numba."""

_INSIDE = {
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}  # what would make it callable from outside kernels

part = njit(fastmath=set(_FASTMATH), **_INSIDE)
"""Decorates a function that kernels call, and they alone; it is compiled as part of them."""

inlined_part = njit(fastmath=set(_FASTMATH), forceinline=True, **_INSIDE)
"""Decorates functions like `part`, but inlines them into the loop itself, so that constants of the
loop are constants in them."""

exact_part = njit
"""Decorates functions like `part`, for kernels that are `exact`; the function can be called from
anywhere."""


class Kernel:
    """A compiled loop. Each of its signatures is compiled when arguments of its types first come,
    which takes seconds, or a moment where the code was kept. Other kernels may call the loop."""

    is_compiling = False  # as numba asks of whatever another kernel calls

    def __init__(self, function: Callable, signatures: Sequence[str], **options: object) -> None:
        self._function = function
        self._signatures = signatures
        self._options = options
        self._compiled: dict[str, Dispatcher] = {}
        self._entries: dict[str, str] = {}
        self._found: dict[tuple, Dispatcher] = {}  # by the dtypes of arguments
        self._alone: Dispatcher | None = None  # the code of the only signature, once compiled

    def __call__(self, *arguments: object) -> object:
        if self._alone is not None:
            return self._alone(*arguments)
        dtypes = tuple([getattr(arguments[place], "dtype", None) for place in self._telling])
        run = self._found.get(dtypes)
        if run is None:
            run = self.fitting([typeof(each) for each in arguments])
            self._found = self._found | {dtypes: run}
        return run(*arguments)

    @cached_property
    def _telling(self) -> list[int]:
        """The places of the arguments whose types are not the same in all signatures."""
        wanted = [normalize_signature(signature)[0] for signature in self._signatures]
        return [
            place for place, types in enumerate(zip(*wanted, strict=True)) if len(set(types)) > 1
        ]

    def compiled(self, signature: str | None = None) -> Dispatcher:
        """The code for this signature, by default the only one."""
        if signature is None:
            (signature,) = self._signatures
        if signature not in self._compiled:
            self._compiled = self._compiled | {signature: self._compile(signature)}
            self._alone = self._compiled[signature] if len(self._signatures) == 1 else None
        return self._compiled[signature]

    def of(self, like: np.ndarray) -> Dispatcher:
        """Return the code for this array where it alone tells the signatures apart."""
        (place,) = self._telling
        wanted = [normalize_signature(signature)[0][place] for signature in self._signatures]
        return self.compiled(self._signatures[wanted.index(typeof(like))])

    @cached_property
    def _numba_type_(self) -> types.Type:
        """Type that numba asks for when another kernel calls this one."""
        return _KernelType(self)

    def fitting(self, given: Sequence[types.Type]) -> Dispatcher:
        """The code for arguments of these types. Raises TypeError where no signature takes them."""
        return self.compiled(self._signature_for(given))

    def address(self, signature: str | None = None) -> int:
        """Return where the code for this signature begins, by default the only one, for kernels
        that call it by its address."""
        (result,) = self.compiled(signature).overloads.values()
        return result.library.get_pointer_to_function(result.fndesc.llvm_func_name)

    def entry_for(self, given: Sequence[types.Type]) -> object:
        """Return the `entry` for arguments of these types."""
        return self.entry(self._signature_for(given))

    def entry(self, signature: str) -> object:
        """Return the handle by which numba finds the code for calls from other kernels. It is a
        name if a process that finds their code in the cache can load this kernel, otherwise the
        code itself, which becomes part of theirs."""
        (result,) = self.compiled(signature).overloads.values()
        function = self._function
        if getattr(sys.modules[function.__module__], function.__name__, None) is not self:
            return result.entry_point
        if signature not in self._entries:
            name = callable_by_name(result, function.__module__, function.__name__, signature)
            self._entries = self._entries | {signature: name}
        return self._entries[signature]

    def _signature_for(self, given: Sequence[types.Type]) -> str:
        convert = cpu_target.typing_context.can_convert
        for signature in self._signatures:
            wanted, _ = normalize_signature(signature)
            pairs = zip(given, wanted, strict=False)
            if len(given) == len(wanted) and all(convert(*pair) is not None for pair in pairs):
                return signature
        raise TypeError(
            f"{self._function.__name__} takes {' or '.join(self._signatures)}, not {given}"
        )

    def _compile(self, signature: str) -> Dispatcher:
        dispatcher = njit(**self._options)(self._function)
        try:
            dispatcher.enable_caching()
            # numba's stamp is of the kernel's own file.
            kept = dispatcher._cache._cache_file
            kept._source_stamp = (kept._source_stamp, digest(self._function.__module__))
            dispatcher.compile(signature)
        except _NOT_KEPT:
            _warn()
            dispatcher = njit(**self._options)(self._function)
            dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher


class _KernelType(types.Dispatcher):
    """A kernel where another calls it: the code for the types of the arguments."""

    def get_call_type(self, context: object, args: Sequence[types.Type], kws: dict) -> Signature:
        return typeof(self.dispatcher.fitting(args)).get_call_type(context, args, kws)

    def get_overload(self, sig: Signature) -> object:
        return self.dispatcher.entry_for(sig.args)


register_model(_KernelType)(models.OpaqueModel)


def kernel(
    signature: str | list[str], *, nogil: bool = False, exact: bool = False
) -> Callable[[Callable], Callable]:
    """Compile for this signature, or these, each when it is first called, and keep the result.

    It is kept beside the source or in the user's cache folder, until the source changes or the
    source of a module that it imports.

    `nogil` releases the GIL for loops that run longer than other threads should wait. `exact` keeps
    the order of operations and the rounding of plain Python, for results that others must be able
    to recompute. Where no cache can be written or read, the function is compiled anew in every
    process, with one warning for all functions.
    """
    signatures = [signature] if isinstance(signature, str) else signature
    fastmath = False if exact else set(_FASTMATH)

    def compiled(function: Callable) -> Callable:
        if config.DISABLE_JIT:
            return function
        return Kernel(function, signatures, nogil=nogil, fastmath=fastmath, no_cfunc_wrapper=True)

    return compiled


@cache
def _warn() -> None:
    warnings.warn(
        "compiled code cannot be kept, so that every start compiles it anew: set NUMBA_CACHE_DIR "
        "to an empty folder that can be written",
        stacklevel=1,
    )
