"""Launches of one Triton kernel again and again with the same grid, sizes and constants. Importing this module does not
import triton.

Triton's own launch looks at every argument each time, which takes a host several times as long as the driver's call.
What it looks for here can only change with a tensor's dtype, device or border of 16 bytes.
"""

from collections.abc import Sequence

import torch


class Repeated:
    """A kernel whose parameters are tensors, then words that it does not specialise on, then `sizes`; `constants` are
    those that it is compiled for, with its options."""

    def __init__(self, kernel, grid: Sequence[int], sizes: Sequence[int], **constants: object) -> None:
        self._kernel, self._grid, self._sizes, self._constants = kernel, (*grid, 1, 1)[:3], sizes, constants
        self._behind = (*sizes, *(constants[name] for name in kernel.arg_names if name in constants))
        self._runs: dict[tuple, object] = {}

    def __call__(self, tensors: Sequence[torch.Tensor | None], words: Sequence[int] = ()) -> None:
        """Launch it on the current stream."""
        key = tuple([None if one is None else (one.dtype, one.get_device(), one.data_ptr() % 16) for one in tensors])
        run = self._runs.get(key)
        if run is not None:
            run(*tensors, *words, *self._behind)
            return
        compiled = self._kernel[self._grid](*tensors, *words, *self._sizes, **self._constants)
        if compiled is not None:  # None: the interpreter has run it
            self._runs[key] = compiled[self._grid]


def blocks(count: int, size: int) -> int:
    """How many blocks of `size` hold `count`. Triton's own functions are made for kernels, and slow on a host."""
    return -(-count // size)


def width(count: int) -> int:
    """The power of two that holds `count`."""
    return 1 << (count - 1).bit_length()
