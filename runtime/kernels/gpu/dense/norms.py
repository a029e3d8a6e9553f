"""RMS norms of rows in a Triton kernel, also of a sum of two, which it writes too. Importing this
module imports triton.

Sums are in float32; numbers are rounded where the module rounds them.
"""

import torch
import triton
import triton.language as tl

from runtime.kernels.decoder.norms import Norm
from runtime.kernels.gpu.repeated import Repeated, blocks, width

_NUMBERS = 1024  # of a program, unless a row has more


class NormKernel:
    """The kernel of one norm, for any number of rows [.., H] on the norm's device."""

    def __init__(self, norm: Norm) -> None:
        hidden = len(norm.weight)
        block = width(hidden)
        self._weight = norm.weight
        self._rows = max(1, _NUMBERS // block)  # of a program
        self._sizes = (hidden, norm.eps, int(norm.is_rounded))
        self._constants = {"block": block, "num_warps": max(4, min(block // 256, 8))}
        self._of_one = Repeated(_normalise, (1,), (1, *self._sizes), rows=1, **self._constants)

    def normalise(self, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """Return the norm of x, or, where `added` is given, of the sum of both, which takes the
        place of `added`."""
        out = torch.empty_like(x)
        tensors = (x, added, self._weight, out)
        count = x.numel() // len(self._weight)
        if count == 1:
            self._of_one(tensors)
        else:
            grid = (blocks(count, self._rows),)
            _normalise[grid](*tensors, count, *self._sizes, rows=self._rows, **self._constants)
        return out


@triton.jit(do_not_specialize=["is_rounded", "count"])
def _normalise(
    x_ptr, added_ptr, weights_ptr, out_ptr, count, hidden, eps, is_rounded,
    rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Compute some rows."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    places = tl.arange(0, block)
    is_place = places < hidden
    is_there = (row < count)[:, None] & is_place[None, :]
    own = row.to(tl.int64)[:, None] * hidden + places[None, :]
    x = tl.load(x_ptr + own, mask=is_there, other=0.0).to(tl.float32)
    if added_ptr is not None:
        x += tl.load(added_ptr + own, mask=is_there, other=0.0).to(tl.float32)
        x = x.to(dtype)
        tl.store(added_ptr + own, x, mask=is_there)
        x = x.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=1) / hidden + eps)[:, None]
    x = tl.where(is_rounded != 0, x.to(dtype).to(tl.float32), x)
    x *= tl.load(weights_ptr + places, mask=is_place, other=0.0)[None, :]
    tl.store(out_ptr + own, x.to(dtype), mask=is_there)
