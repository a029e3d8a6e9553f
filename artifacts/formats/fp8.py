"""Eight-bit floats with a scale for each block, row or matrix: DeepSeek-V3, Qwen3, GLM and MiniMax
in FP8, and compressed-tensors' `float-quantized` and `int-quantized`.

`w[o, k] = weight[o, k] * scale[o // b, k // c]`, where b x c is the block, as the shape of the
scales says. The last block of a row or column may be cut off (finegrained_fp8.py of transformers;
DeepSeek-V3's `weight_dequant`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from artifacts.common.lazy_torch import torch
from artifacts.errors import BadInput
from artifacts.formats.base import (
    DAMAGED,
    NOT_FINITE,
    Described,
    Format,
    Loop,
    PlacedTensors,
    Stored,
    are_sound,
    fault_of_scales,
    is_number,
    loops,
    require,
)
from artifacts.formats.schemes import (
    BLOCK,
    HEAD,
    Group,
    Said,
    Scheme,
    Spelling,
    patterns,
    whole_number,
)


@dataclass(frozen=True, slots=True)
class Scaled(Format):
    """Eight-bit weights and their scales; `block` is the rows and columns of a block as the config
    gives them."""

    name: str = "fp8"
    block: tuple[int, int] = (BLOCK, BLOCK)

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        weight = stored["weight"]
        scale = stored["scale"]
        require(
            weight.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8),
            f"weights of {weight.dtype} with one scale: of 8 bits are float8 and int8",
        )
        require(
            is_number(scale.dtype) or scale.dtype is torch.float8_e8m0fnu,
            f"scales of {scale.dtype}",
        )
        require(
            len(weight.shape) == 2 and 0 not in weight.shape,
            f"a matrix of shape {list(weight.shape)}",
        )
        grid = _grid(scale.shape)
        fits = (_grid((1,)), (weight.shape[0], 1), _blocks(weight.shape, self.block))
        require(
            grid in fits,
            f"scales {list(scale.shape)} are of no blocks of a matrix {list(weight.shape)}",
        )
        return weight.shape

    def dequantise(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weight = tensors["weight"].float()
        return weight * self._spread(tensors["scale"].float(), weight.shape)

    def loop(self, tensors: Mapping[str, torch.Tensor]) -> Loop | None:
        weight = tensors["weight"]
        scale = tensors["scale"].float()
        grid = scale.reshape(_grid(tuple(scale.shape))).numpy()
        values = torch.arange(256, dtype=torch.uint8).view(weight.dtype).float().numpy()
        block = self.scaled_block(weight.shape, scale.shape)
        return partial(loops().from_bytes, weight.view(torch.uint8).numpy(), values, grid, *block)

    def scaled_block(self, weight: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, ...]:
        """Rows and columns that one scale multiplies, from the shapes of the weights and the
        scales."""
        return tuple(
            -(-size // count) if count in (1, size) else block
            for size, count, block in zip(weight, _grid(scale), self.block, strict=True)
        )

    def fault(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        weight = tensors["weight"]
        scale = tensors["scale"].float()
        if not are_sound([weight]):
            return NOT_FINITE
        largest = (
            torch.iinfo(weight.dtype).max
            if weight.dtype is torch.int8
            else torch.finfo(weight.dtype).max
        )
        if fault := fault_of_scales(scale, largest):
            return fault
        if bool((scale < 0).any()):
            return f"a negative scale, {DAMAGED}"
        is_zero = scale == 0
        if bool(is_zero.any()) and bool(
            weight[self._spread(is_zero, weight.shape).expand(weight.shape)].float().any()
        ):
            return f"a scale of 0 for weights that are not 0, {DAMAGED}"
        return None

    def described(self, tensors: PlacedTensors) -> Described:
        weight = tensors.placed["weight"]
        # bits of the mantissa, bias of the exponent
        floats = {torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15)}.get(weight.dtype, ())
        codes = tensors.codes("weight", "float" if floats else "signed", 8, "rows", *floats)
        height, width = self.scaled_block(weight.shape, tensors.shape("scale"))
        num_groups = -(-tensors.num_inputs // width)
        scales = tensors.scales_at("scale", num_groups, height, width, num_groups, 1)
        return Described(codes, scales)

    def row_heights(self, stored: Mapping[str, Stored]) -> Mapping[str, int]:
        height, _ = self.scaled_block(stored["weight"].shape, stored["scale"].shape)
        return {"weight": 1, "scale": height}

    def _spread(self, of_blocks: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the values of blocks as values of each row and column of a matrix of this shape.
        Values of each row, each column or the whole matrix keep their shape, to be broadcast."""
        spread = of_blocks.reshape(_grid(tuple(of_blocks.shape)))
        for axis, (size, count) in enumerate(zip(shape, spread.shape, strict=True)):
            if count > 1 and count != size:
                spread = spread.repeat_interleave(self.block[axis], axis).narrow(axis, 0, size)
        return spread


def _grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the scales' shape as rows and columns: one scale for all is [1, 1], and one for each
    row [rows, 1]. modelopt stores scales of blocks as [rows, 1, columns, 1]."""
    if len(shape) == 4 and shape[1] == shape[3] == 1:
        return shape[::2]
    return (*shape, *(1, 1)[len(shape) :])


def _blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return tuple(-(-size // width) for size, width in zip(shape, block, strict=True))


def said(config: Mapping) -> Said:
    """Read the config of a checkpoint in FP8."""
    if config.get("expert_dtype", "fp8") != "fp8":
        raise BadInput(
            f"experts of {str(config['expert_dtype'])[:40]} beside FP8: moectl reads experts in fp8"
        )
    left = patterns(config, "modules_to_not_convert") or patterns(config, "ignored_layers")
    scheme = scaled("fp8", block_of(config.get("weight_block_size")), "_scale_inv", "_scale")
    return Said((Group(scheme),), left + HEAD)


def block_of(size: object) -> tuple[int, int]:
    """Rows and columns of a block, as a config gives them."""
    if not size:
        return BLOCK, BLOCK
    block = tuple(map(whole_number, size)) if isinstance(size, list) else ()
    if len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise BadInput(f"weight_block_size is {json.dumps(size)[:40]}, which is no size of a block")
    return block


def scaled(layout: str, block: tuple[int, int], *suffixes: str) -> Scheme:
    """The scheme of eight bits with a scale for each block; names of scales end in one of the
    suffixes."""
    # Scales of a row or a matrix are told by their shape, whatever the config says.
    form = Scaled(block=block if min(block) > 1 else (BLOCK, BLOCK))
    spellings = tuple(Spelling(form, {"weight": "", "scale": suffix}) for suffix in suffixes)
    return Scheme(layout, 8, block, 4, spellings)


def float_quantized(block: tuple[int, int]) -> Scheme:
    """The scheme of compressed-tensors' and modelopt's eight bits."""
    return scaled("float-quantized", block, "_scale")
