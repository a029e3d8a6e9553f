"""Launches of one Triton kernel again and again with the same grid, sizes and constants. Importing
this module does not import triton.

Triton's own launch inspects every argument each time, and prepares the data of its profiler's
hooks, which takes a host several times as long as the driver's call. What it finds can only change
with a tensor's dtype, device or 16-byte alignment. The hooks are told of a first launch only.
"""

from collections.abc import Callable, Sequence
from importlib import import_module

import torch

_Kind = tuple[torch.dtype, int] | None
_NO_HOOKS = None, None, None  # no hooks, and no data for them


def _kind(one: torch.Tensor | None) -> _Kind:
    """Return the properties of a tensor that a kernel is compiled for: its dtype and its address
    modulo 16."""
    return None if one is None else (one.dtype, one.data_ptr() % 16)


class Kept:
    """Tensors that many launches take, inspected once."""

    __slots__ = ("number", "tensors")
    _numbers: dict[tuple[_Kind, ...], int] = {}

    def __init__(self, *tensors: torch.Tensor | None) -> None:
        self.tensors = tensors
        self.number = self._numbers.setdefault(tuple(map(_kind, tensors)), len(self._numbers))


_NOTHING = Kept()


class Repeated:
    """Kernel whose parameters are tensors, then kept tensors, then words that it does not
    specialise on, then `sizes`. `constants` are the values that it is compiled for, with its
    options."""

    def __init__(
        self, kernel, grid: Sequence[int], sizes: Sequence[int], **constants: object
    ) -> None:
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._sizes = sizes
        self._constants = constants
        self._behind = (
            *sizes,
            *(constants[name] for name in kernel.arg_names if name in constants),
        )
        self._runs: dict[tuple, tuple[Callable[..., None], tuple]] = {}
        self._driver = None  # Triton's, once it has compiled the kernel

    def __call__(
        self,
        tensors: Sequence[torch.Tensor | None],
        words: Sequence[int] = (),
        kept: Kept = _NOTHING,
    ) -> None:
        """Launch it on the current stream of the current device."""
        if self._driver is not None:
            device = self._driver.get_current_device()
            if found := self._runs.get(self._key(device, tensors, kept)):
                run, own = found
                stream = self._driver.get_current_stream(device)
                run(*self._grid, stream, *own, *tensors, *kept.tensors, *words, *self._behind)
                return
        compiled = self._kernel[self._grid](
            *tensors, *kept.tensors, *words, *self._sizes, **self._constants
        )
        if compiled is not None:  # None: the interpreter has run it
            self._driver = _driver()
            key = self._key(self._driver.get_current_device(), tensors, kept)
            self._runs[key] = (
                compiled.run,
                (compiled.function, compiled.packed_metadata, *_NO_HOOKS),
            )

    def _key(self, device: int, tensors: Sequence[torch.Tensor | None], kept: Kept) -> tuple:
        return (
            device,
            kept.number,
            *[None if one is None else (one.dtype, one.data_ptr() % 16) for one in tensors],
        )


def _driver() -> object:
    return import_module("triton.runtime.driver").driver.active


def blocks(count: int, size: int) -> int:
    """Return how many blocks of `size` hold `count`. Triton's own functions are made for kernels,
    and slow on a host."""
    return -(-count // size)


def width(count: int) -> int:
    """Return the least power of two that holds `count`."""
    return 1 << (count - 1).bit_length()
