"""The numbers of a stored matrix in the dtype of a module: by compiled loops on a CPU, else by the format's formula.

Both give the same bits. The loops need a few per cent of the time, and no memory but the result and a panel.
"""

from collections.abc import Mapping

import torch

from artifacts.formats.base import Format, Stored

_PANEL = 1 << 18  # weights: a panel stays in a core's cache


def numbers(format: Format, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The matrix [out, in] in this dtype, rounded to nearest, ties to even."""
    fill = format.loop(tensors) if next(iter(tensors.values())).device.type == "cpu" else None
    if fill is None:
        return format.dequantise(tensors).to(dtype)
    num_rows, num_columns = format.shape({role: Stored(tensor.dtype, tensor.shape) for role, tensor in tensors.items()})
    out = torch.empty(num_rows, num_columns, dtype=dtype)
    height = max(1, _PANEL // num_columns)
    panel = torch.empty(height, num_columns)
    for first in range(0, num_rows, height):
        rows = panel[: num_rows - first]
        fill(first, rows.numpy())
        out[first : first + height] = rows
    return out
