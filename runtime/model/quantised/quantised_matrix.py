"""Matrices that lie in a slot in few bits: their numbers, whole or in tiles of rows, and their
products with tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from artifacts.formats.base import NOT_FINITE, Format, are_sound
from artifacts.formats.numbers import ROWS_STEP, Fill, filler, turn
from runtime.model.arithmetic import project

PLAIN = ""  # the role of the only tensor of a parameter that is not quantised
# weights of a tile: torch multiplies by small ones slowly
_MULTIPLIED = 1 << 21
_TURNED = 1 << 16


class QuantisedMatrix(NamedTuple):
    """One matrix in a slot: a format with its tensors by role, views of the slot."""

    format: Format | None
    tensors: Mapping[str, torch.Tensor]

    @property
    def shape(self) -> tuple[int, int]:
        if self.format is None:
            return tuple(self.tensors[PLAIN].shape)
        return self.format.shape(self.tensors)

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def filler(self, dtype: torch.dtype) -> Fill:
        """Return a function that writes rows of the matrix in this dtype."""
        if self.format is None:
            return lambda first, out: out.copy_(self.tensors[PLAIN][first : first + len(out)])
        return filler(self.format, self.tensors, dtype)

    def fault(self) -> str | None:
        """Return the fault of its numbers, such as NaN, that no model's matrix has; None if they
        are sound."""
        if self.format is None:
            return None if are_sound(self.tensors.values()) else NOT_FINITE
        return self.format.fault(self.tensors)


Parts = dict[str, list[QuantisedMatrix] | torch.Tensor]


def project_quantised(
    module: nn.Module, weights: Parts, name: str, x: torch.Tensor
) -> torch.Tensor:
    """Compute one projection of one expert, x [t, in] -> [t, out], on numbers in x's dtype that lie
    as in the module.

    The result is bit-identical to that of the module with dequantised weights.
    """
    if isinstance(weights[name], torch.Tensor):
        return project(module, weights, name, x)
    whole = {name: joined(weights[name], x.dtype, is_transposed=module.is_transposed)}
    bias = f"{name}_bias"
    return project(module, whole | {bias: weights[bias]} if module.has_bias else whole, name, x)


def project_in_tiles(module: nn.Module, weights: Parts, name: str, x: torch.Tensor) -> torch.Tensor:
    """Compute the same projection as `project_quantised`, without ever writing the whole matrix to
    memory; products may be summed in another order."""
    matrices = weights[name]
    if isinstance(matrices, torch.Tensor):
        if x.dtype is not torch.float16 or module.is_transposed:
            return project(module, weights, name, x)
        matrices = [QuantisedMatrix(None, {PLAIN: matrices})]
    y = linear_in_tiles(matrices, x)
    return y + weights[f"{name}_bias"] if module.has_bias else y


def linear_in_tiles(matrices: Sequence[QuantisedMatrix], x: torch.Tensor) -> torch.Tensor:
    """Return x [t, in] times the rows of all matrices, [t, out], without ever writing a whole
    matrix to memory. Products of float16 are computed in float32, in which torch multiplies
    faster."""
    dtype = torch.float32 if x.dtype is torch.float16 else x.dtype
    y = x.new_empty(len(x), sum(matrix.shape[0] for matrix in matrices))
    wide = x.to(dtype)
    for first, tile in _tiles(matrices, dtype, _MULTIPLIED):
        y[:, first : first + len(tile)] = F.linear(wide, tile)
    return y


def joined(
    matrices: Sequence[QuantisedMatrix], dtype: torch.dtype, *, is_transposed: bool
) -> torch.Tensor:
    """Return the rows of all matrices as one, [out, in], or [in, out] if `is_transposed`."""
    shapes = [matrix.shape for matrix in matrices]  # asked once, for each answer is checked
    num_rows = sum(height for height, _ in shapes)
    num_columns = shapes[0][1]
    shape = (num_columns, num_rows) if is_transposed else (num_rows, num_columns)
    whole = torch.empty(shape, dtype=dtype, device=matrices[0].device)
    first = 0
    if is_transposed:
        for first, tile in _tiles(matrices, dtype, _TURNED):
            turn(tile, whole[:, first : first + len(tile)])
        return whole
    for matrix, (height, _) in zip(matrices, shapes, strict=True):
        matrix.filler(dtype)(0, whole[first : first + height])
        first += height
    return whole


def _tiles(
    matrices: Sequence[QuantisedMatrix], dtype: torch.dtype, num_weights: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the rows of all matrices in turn, in tiles of about `num_weights` weights in the same
    memory, each with the number of its first row."""
    num_columns = matrices[0].shape[1]
    start = 0
    height = max(1, num_weights // (num_columns * ROWS_STEP)) * ROWS_STEP
    room = torch.empty(height, num_columns, dtype=dtype, device=matrices[0].device)
    for matrix in matrices:
        fill = matrix.filler(dtype)
        num_rows = matrix.shape[0]
        for first in range(0, num_rows, height):
            tile = room[: num_rows - first]
            fill(first, tile)
            yield start + first, tile
        start += num_rows
