"""The numbers of a stored matrix in the dtype of a module: by compiled loops on a CPU, else by the
format's formula.

Both give the same bits. The loops need at most a few per cent of the time, and no memory but the
result and at most a panel.
"""

from collections.abc import Callable, Mapping

import torch

from artifacts.formats.base import Format, Loop, loops

_AS_NUMPY = {
    torch.float32: torch.float32,
    torch.float16: torch.uint16,
    torch.bfloat16: torch.uint16,
}
_PANEL = 1 << 15  # weights, float32, that stay in a core's cache until they are rounded
ROWS_STEP = 64
"""A multiple of the rows that have codes in one word."""


Fill = Callable[[int, torch.Tensor], None]
"""Fills a tensor [n, in] with the rows of a matrix from a multiple of `ROWS_STEP` on."""


def numbers(
    format: Format, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """The matrix [out, in] in this dtype, rounded to nearest, ties to even."""
    out = torch.empty(
        format.shape(tensors), dtype=dtype, device=next(iter(tensors.values())).device
    )
    filler(format, tensors, dtype)(0, out)
    return out


def filler(format: Format, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Fill:
    """A function that writes rows of the matrix in this dtype."""
    is_on_cpu = next(iter(tensors.values())).device.type == "cpu"
    fill = format.loop(tensors) if is_on_cpu else None
    if fill is None:
        whole = format.dequantise(tensors).to(dtype)
        return lambda first, out: out.copy_(whole[first : first + len(out)])
    if dtype is torch.float32:
        return lambda first, out: fill(first, out.numpy())
    if dtype is torch.bfloat16 and format.fills_bfloat16:
        return lambda first, out: fill(first, out.view(torch.uint16).numpy())
    return lambda first, out: _fill_rounded(fill, first, out)


def turn(matrix: torch.Tensor, out: torch.Tensor) -> None:
    """Write the transposed matrix [m, n] to `out` [n, m], whose rows need not be adjacent."""
    if matrix.device.type != "cpu" or matrix.dtype not in _AS_NUMPY:
        out.copy_(matrix.T)
        return
    kind = _AS_NUMPY[matrix.dtype]
    loops("integers.column_loops").turn(matrix.view(kind).numpy(), out.view(kind).numpy())


def _fill_rounded(fill: Loop, first: int, out: torch.Tensor) -> None:
    height = -(-_PANEL // (ROWS_STEP * out.shape[1])) * ROWS_STEP
    panel = torch.empty(min(height, len(out)), out.shape[1])
    for start in range(0, len(out), height):
        rows = out[start : start + height]
        fill(first + start, panel[: len(rows)].numpy())
        rows.copy_(panel[: len(rows)])
