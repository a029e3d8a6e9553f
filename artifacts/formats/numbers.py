"""The numbers of a stored matrix in the dtype of a module: by compiled loops on a CPU, else by the format's formula.

Both give the same bits. The loops need a few per cent of the time, and no memory but the result and at most a panel.
"""

from collections.abc import Callable, Mapping

import torch

from artifacts.formats.base import Format, Loop, Stored

_PANEL = 1 << 15  # weights, float32, that stay in a core's cache until they are rounded
ROWS_STEP = 64
"""Rows from `filler` begin at a multiple of this: no word has codes of rows on both sides of it."""


def numbers(format: Format, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The matrix [out, in] in this dtype, rounded to nearest, ties to even."""
    fill = filler(format, tensors, dtype)
    if fill is None:
        return format.dequantise(tensors).to(dtype)
    shape = format.shape({role: Stored(tensor.dtype, tensor.shape) for role, tensor in tensors.items()})
    out = torch.empty(shape, dtype=dtype)
    fill(0, out)
    return out


def filler(
    format: Format, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> Callable[[int, torch.Tensor], None] | None:
    """A function that fills a tensor [n, in] of this dtype with the rows from a multiple of `ROWS_STEP` on; None where
    there are no compiled loops."""
    fill = format.loop(tensors) if next(iter(tensors.values())).device.type == "cpu" else None
    if fill is None:
        return None
    if dtype is torch.float32:
        return lambda first, out: fill(first, out.numpy())
    if dtype is torch.bfloat16 and format.fills_bfloat16:
        return lambda first, out: fill(first, out.view(torch.uint16).numpy())
    return lambda first, out: _fill_rounded(fill, first, out)


def _fill_rounded(fill: Loop, first: int, out: torch.Tensor) -> None:
    height = -(-_PANEL // (ROWS_STEP * out.shape[1])) * ROWS_STEP
    panel = torch.empty(min(height, len(out)), out.shape[1])
    for start in range(0, len(out), height):
        rows = out[start : start + height]
        fill(first + start, panel[: len(rows)].numpy())
        rows.copy_(panel[: len(rows)])
