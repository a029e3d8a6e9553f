"""Base of ggml's types: rows of blocks, each of which holds its scales and its codes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from artifacts.formats.base import NOT_FINITE, Described, Format, PlacedTensors, Stored, require

Scales = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class GgmlBlocks(Format):
    """`blocks` uint8 [out, in / num_weights * nbytes]; `scale`, beside NVFP4's alone, float32 of
    one number, which multiplies the scales.

    `scales` gives the scales and the minima of blocks uint8 [n, nbytes], each float32 [n, groups].
    """

    name: str
    num_weights: int  # of a block
    nbytes: int  # of a block
    scales: Callable[[torch.Tensor], Scales] = field(compare=False)

    def codes(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the codes float32 [n, num_weights] of blocks uint8 [n, nbytes]."""
        raise NotImplementedError

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        blocks = stored["blocks"]
        require(blocks.dtype is torch.uint8 and len(blocks.shape) == 2, f"blocks of {blocks.dtype}")
        num_outputs, row_nbytes = blocks.shape
        require(row_nbytes > 0 and row_nbytes % self.nbytes == 0, f"rows of {row_nbytes} bytes")
        return num_outputs, row_nbytes // self.nbytes * self.num_weights

    def dequantise(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        blocks = self.blocks_of(tensors)
        scales, minima = self.scales_of(tensors)
        products = self.codes(blocks).unflatten(1, (scales.shape[1], -1)) * scales[..., None]
        numbers = products if minima is None else products - minima[..., None]
        return numbers.reshape(len(tensors["blocks"]), -1)

    def described(self, tensors: PlacedTensors) -> Described:
        return Described(tensors.codes("blocks", self.name, 0, "blocks"))

    def fault(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        scales = (each for each in self.scales_of(tensors) if each is not None)
        return None if all(bool(each.isfinite().all()) for each in scales) else NOT_FINITE

    def scales_of(self, tensors: Mapping[str, torch.Tensor]) -> Scales:
        """Return the scales and minima of all blocks, with the scale of the matrix."""
        scales, minima = self.scales(self.blocks_of(tensors))
        whole = tensors.get("scale")
        return scales if whole is None else scales * whole.reshape(()), minima

    def blocks_of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return all blocks, uint8 [n, nbytes]."""
        return tensors["blocks"].reshape(-1, self.nbytes)


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 at this byte of each block, float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def one_scale(blocks: torch.Tensor, at: int = 0) -> Scales:
    """Return the scale of each block, float16 at this byte, and no minima."""
    return half(blocks, at), None


def bits(packed: torch.Tensor, width: int, run: int = 1) -> torch.Tensor:
    """Return the numbers of `width` bits in bytes [n, m], by runs of bytes: the lowest bits of all
    bytes of a run first. uint8 [n, m * 8 / width]."""
    mask = (1 << width) - 1
    runs = packed.unflatten(1, (-1, run))
    return torch.stack([runs >> shift & mask for shift in range(0, 8, width)], 2).flatten(1)


def by_row(tensor: torch.Tensor, num_rows: int) -> np.ndarray:
    """Return what blocks [n, ...] have, by the rows of their matrix, for compiled loops."""
    return tensor.reshape(num_rows, -1).contiguous().numpy()
