"""ggml's types with grids: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS and IQ3_S, and Q1_0 and
Q2_0, whose bytes are read as points of a grid (ggml-common.h, ggml-quants.c).

A code of 8 to 11 bits is the number of a point of a fixed grid, which has 8 weights, or 4 in IQ3
and Q2_0: `w = scale * point * sign`. IQ1, Q1_0 and Q2_0 have no signs. In IQ1 the weights are all
larger or all smaller than the point by an eighth. Every product is rounded to float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial

import torch

from artifacts.formats.base import Loop, loops
from artifacts.formats.gguf.blocks import GgmlBlocks, Scales, bits, by_row, half, one_scale
from artifacts.formats.gguf.gguf_header import TYPES

_BITS = {"Q1_0": (1, 2), "Q2_0": (2, 1)}
"""Bits of a weight, and the distance between the weights, of which the least is -1."""
_Points = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class GridBlocks(GgmlBlocks):
    """`points` gives the numbers of the points of blocks uint8 [n, nbytes], int16 [n, points], and
    the signs uint8 [n, num_weights / 8], whose bit j says that weight j of 8 is negative."""

    points: Callable[[torch.Tensor], _Points] = field(compare=False)

    def loop(self, tensors: Mapping[str, torch.Tensor]) -> Loop:
        blocks = self.blocks_of(tensors)
        points, signs = self.points(blocks)
        if signs is None:
            signs = torch.zeros(len(blocks), self.num_weights // 8, dtype=torch.uint8)
        of_blocks = points, signs, self.scales_of(tensors)[0]
        of_rows = (by_row(each, len(tensors["blocks"])) for each in of_blocks)
        in_fours = grid(self.name).view(-1, 4).numpy()
        return partial(
            loops("gguf.ggml_loops").from_points,
            *of_rows,
            in_fours,
            _signs_of_bytes(blocks.device).numpy(),
        )

    def codes(self, blocks: torch.Tensor) -> torch.Tensor:
        points, signs = self.points(blocks)
        codes = _grid_on(self.name, blocks.device)[points.int()].flatten(1).float()
        if signs is not None:
            codes = codes * _signs_of_bytes(blocks.device)[signs.int()].flatten(1)
        return codes


@cache
def grid(name: str) -> torch.Tensor:
    """Return the points of a type's grid, int8 [points, 8] or [points, 4].

    Those of IQ1 are in eighths: first all points with an eighth more, then with an eighth less. The
    package `gguf` has the grids; importing it takes a fifth of a second.
    """
    if name in _BITS:
        width, step = _BITS[name]
        return step * bits(torch.arange(256, dtype=torch.uint8)[:, None], width).char() - 1
    from gguf import quants

    kind = getattr(quants, "IQ1_S" if name == "IQ1_M" else name)
    kind.init_grid()
    points = torch.from_numpy(kind.grid).reshape(kind.grid_shape)
    return (torch.cat((8 * points + 1, 8 * points - 1)) if "IQ1" in name else points).char()


@cache
def _grid_on(name: str, device: torch.device) -> torch.Tensor:
    return grid(name).to(device)


@cache
def _signs_of_bytes(device: torch.device) -> torch.Tensor:
    """Return the sign of each bit of a byte, int8 [256, 8]."""
    return 1 - 2 * bits(torch.arange(256, dtype=torch.uint8, device=device)[:, None], 1).char()


def _words(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return words of 2 or 4 bytes with a sign."""
    return blocks.contiguous().view(dtype)


def _even(signs: torch.Tensor) -> torch.Tensor:
    """Return signs with the eighth, which makes the number of negative weights even, from the
    seven that are stored."""
    odd = signs ^ signs >> 4
    odd = odd ^ odd >> 2
    return (signs | ((odd ^ odd >> 1) & 1) << 7).byte()


def _in_sevens(words: torch.Tensor) -> torch.Tensor:
    """Return the signs in the lower 28 bits of words [n, m]: [n, 4 m]."""
    return _even(torch.stack([words >> shift & 0x7F for shift in (0, 7, 14, 21)], 2).flatten(1))


def _scales_from_half(blocks: torch.Tensor, upper: slice, factor: float) -> Scales:
    """Return a block's scale times a half and four bits of each group, in the upper halves of
    bytes."""
    return half(blocks, 0) * (0.5 + (blocks[:, upper] >> 4).float()) * factor, None


def _scales_2(blocks: torch.Tensor, start: int) -> Scales:
    """Scale as `_scales_from_half`, with the four bits of 16 groups in 8 bytes."""
    own = bits(blocks[:, start : start + 8], 4).float()
    return half(blocks, 0) * (0.5 + own) * 0.25, None


def _scales_3s(blocks: torch.Tensor) -> Scales:
    return half(blocks, 0) * (1 + 2 * bits(blocks[:, 106:110], 4).float()), None


def _scales_1s(blocks: torch.Tensor) -> Scales:
    own = _words(blocks[:, 34:50], torch.int16) >> 12 & 7
    return half(blocks, 0) * (2 * own + 1).float() / 8, None


def _scales_1m(blocks: torch.Tensor) -> Scales:
    """Scale of a block, whose four parts are in the upper bits of four words, times those of its 16
    groups, of three bits each below."""
    words = _words(blocks[:, 48:56], torch.int16)
    parts = words >> 12 & 0xF
    whole = sum(parts[:, i : i + 1] << 4 * i for i in range(4)).short().view(torch.float16).float()
    own = torch.stack([words >> shift & 7 for shift in (0, 3, 6, 9)], 2).flatten(1)
    return whole * (2 * own + 1).float() / 8, None


def _points_2xxs(blocks: torch.Tensor) -> _Points:
    groups = blocks[:, 2:66].unflatten(1, (8, 8))
    return groups[..., :4].flatten(1).short(), _in_sevens(
        _words(groups[..., 4:].flatten(1), torch.int32)
    )


def _points_2xs(blocks: torch.Tensor) -> _Points:
    words = _words(blocks[:, 2:66], torch.int16)
    return words & 0x1FF, _even(words >> 9 & 0x7F)


def _points_2s(blocks: torch.Tensor) -> _Points:
    return blocks[:, 2:34].short() | bits(blocks[:, 66:74], 2).short() << 8, blocks[:, 34:66]


def _points_3xxs(blocks: torch.Tensor) -> _Points:
    return blocks[:, 2:66].short(), _in_sevens(_words(blocks[:, 66:98], torch.int32))


def _points_3s(blocks: torch.Tensor) -> _Points:
    return blocks[:, 2:66].short() | bits(blocks[:, 66:74], 1).short() << 8, blocks[:, 74:106]


def _points_1s(blocks: torch.Tensor) -> _Points:
    words = _words(blocks[:, 34:50], torch.int16)
    upper = torch.stack([words >> shift & 7 for shift in (0, 3, 6, 9)], 2)
    is_less = (words >> 15 & 1)[..., None]
    return blocks[:, 2:34].short() | (upper << 8 | is_less << 11).flatten(1), None


def _points_1m(blocks: torch.Tensor) -> _Points:
    return blocks[:, :32].short() | bits(blocks[:, 32:48], 4).short() << 8, None


def _points_in_bytes(blocks: torch.Tensor) -> _Points:
    return blocks[:, 2:].short(), None


_FUNCTIONS = {
    "IQ1_S": (_scales_1s, _points_1s),
    "IQ1_M": (_scales_1m, _points_1m),
    "IQ2_XXS": (partial(_scales_from_half, upper=slice(9, 66, 8), factor=0.25), _points_2xxs),
    "IQ2_XS": (partial(_scales_2, start=66), _points_2xs),
    "IQ2_S": (partial(_scales_2, start=74), _points_2s),
    "IQ3_XXS": (partial(_scales_from_half, upper=slice(69, 98, 4), factor=0.5), _points_3xxs),
    "IQ3_S": (_scales_3s, _points_3s),
    "Q1_0": (one_scale, _points_in_bytes),
    "Q2_0": (one_scale, _points_in_bytes),
}
GRIDS: Mapping[str, GridBlocks] = {
    name: GridBlocks(*TYPES[name], *functions) for name, functions in _FUNCTIONS.items()
}
"""The types with grids, by ggml's name."""
