"""ggml's blocks, which GGUF files are made of: Q8_0, Q4_0, IQ4_NL, IQ4_XS, Q2_K to Q6_K and MXFP4
(ggml-common.h, ggml-quants.c).

A row is a sequence of blocks. `w = scale * code - minimum`, with a scale for each group of 32
weights, or of 16 in Q2_K, Q3_K and Q6_K; Q2_K, Q4_K and Q5_K have a minimum beside it. Every sum
and product is rounded to float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from artifacts.formats.base import (
    NOT_FINITE,
    Described,
    Format,
    Loop,
    PlacedTensors,
    Stored,
    loops,
    require,
)
from artifacts.formats.codes import IQ4
from artifacts.formats.gguf.gguf_header import BLOCKS

_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_NAN = 255  # of a scale of MXFP4, which is an exponent
_Scales = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class GgmlBlocks(Format):
    """`blocks` uint8 [out, in / num_weights * nbytes].

    `scales` gives the scales and the minima of blocks uint8 [n, nbytes], each float32 [n, groups];
    `codes` float32 [n, num_weights]; `fill` is the name of the compiled loop.
    """

    name: str
    num_weights: int  # of a block
    nbytes: int  # of a block
    scales: Callable[[torch.Tensor], _Scales] = field(compare=False)
    codes: Callable[[torch.Tensor], torch.Tensor] = field(compare=False)
    fill: str = field(compare=False)

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        blocks = stored["blocks"]
        require(blocks.dtype is torch.uint8 and len(blocks.shape) == 2, f"blocks of {blocks.dtype}")
        num_outputs, row_nbytes = blocks.shape
        require(row_nbytes > 0 and row_nbytes % self.nbytes == 0, f"rows of {row_nbytes} bytes")
        return num_outputs, row_nbytes // self.nbytes * self.num_weights

    def dequantise(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        blocks = self._blocks(tensors)
        scales, minima = self.scales(blocks)
        products = self.codes(blocks).unflatten(1, (scales.shape[1], -1)) * scales[..., None]
        numbers = products if minima is None else products - minima[..., None]
        return numbers.reshape(len(tensors["blocks"]), -1)

    def loop(self, tensors: Mapping[str, torch.Tensor]) -> Loop | None:
        blocks = tensors["blocks"]
        scales, minima = self.scales(self._blocks(tensors))
        minima = torch.zeros_like(scales) if minima is None else minima
        of_rows = (each.reshape(len(blocks), -1).contiguous().numpy() for each in (scales, minima))
        return partial(getattr(loops("gguf.ggml_loops"), self.fill), blocks.numpy(), *of_rows)

    def described(self, tensors: PlacedTensors) -> Described:
        return Described(tensors.codes("blocks", self.name, 0, "blocks"))

    def fault(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        scales = (each for each in self.scales(self._blocks(tensors)) if each is not None)
        return None if all(bool(each.isfinite().all()) for each in scales) else NOT_FINITE

    def _blocks(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return tensors["blocks"].reshape(-1, self.nbytes)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at this byte of each block, float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _one_scale(blocks: torch.Tensor) -> _Scales:
    return _half(blocks, 0), None


def _exponent(blocks: torch.Tensor) -> _Scales:
    """MXFP4's scale is half a power of two, as the values of its codes are doubled; NaN where its
    byte says so."""
    powers = torch.tensor(
        [2.0 ** (byte - 128) for byte in range(_NAN)] + [torch.nan], device=blocks.device
    )
    return powers[blocks[:, :1].int()], None


def _scales_k(blocks: torch.Tensor) -> _Scales:
    """Q4_K and Q5_K: a block's scale and minimum times those of its 8 groups, which have six bits
    each in 12 bytes."""
    low, middle, high = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((low & 0x3F, (high & 0xF) | (low >> 2 & 0x30)), 1)
    minima = torch.cat((middle & 0x3F, (high >> 4) | (middle >> 2 & 0x30)), 1)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * minima.float()


def _scales_2(blocks: torch.Tensor) -> _Scales:
    """Q2_K: a block's scale and minimum times those of its 16 groups, which have half a byte
    each."""
    of_groups = blocks[:, :16]
    return _half(blocks, 80) * (of_groups & 0xF).float(), _half(blocks, 82) * (
        of_groups >> 4
    ).float()


def _scales_3(blocks: torch.Tensor) -> _Scales:
    """Q3_K: a block's scale times those of its 16 groups, six bits each in 12 bytes, that are 32
    too large."""
    lower = torch.cat([blocks[:, 96:104] >> shift & 0xF for shift in (0, 4)], 1)
    upper = torch.cat([blocks[:, 104:108] >> shift & 3 for shift in (0, 2, 4, 6)], 1)
    return _half(blocks, 108) * ((lower | upper << 4).float() - 32), None


def _scales_iq4(blocks: torch.Tensor) -> _Scales:
    """IQ4_XS: as Q3_K, of 8 groups, whose upper bits are in two bytes and lower ones in the next
    four."""
    lower = torch.stack((blocks[:, 4:8] & 0xF, blocks[:, 4:8] >> 4), 2).flatten(1)
    upper = torch.stack([blocks[:, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], 2).flatten(1)
    return _half(blocks, 0) * ((lower | upper << 4).float() - 32), None


def _scales_6(blocks: torch.Tensor) -> _Scales:
    return _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float(), None


def _halves(packed: torch.Tensor, width: int) -> torch.Tensor:
    """The codes of bytes [n, m] by runs of `width`: the low halves of a run, then its high ones;
    uint8 [n, 2 m]."""
    runs = packed.unflatten(1, (-1, width))
    return torch.stack((runs & 0xF, runs >> 4), 2).flatten(1)


def _codes_8(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float()


def _codes_4(blocks: torch.Tensor) -> torch.Tensor:
    return _halves(blocks[:, 2:], 16).float() - 8


def _codes_mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    return torch.tensor(_E2M1_DOUBLED, device=blocks.device).float()[
        _halves(blocks[:, 1:], 16).int()
    ]


def _codes_iq4(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return torch.tensor(IQ4, device=blocks.device).float()[_halves(blocks[:, start:], 16).int()]


def _codes_2k(blocks: torch.Tensor, start: int = 16) -> torch.Tensor:
    runs = blocks[:, start : start + 64].unflatten(1, (2, 32))
    return torch.stack([runs >> shift & 3 for shift in (0, 2, 4, 6)], 2).flatten(1).float()


def _codes_3k(blocks: torch.Tensor) -> torch.Tensor:
    third = torch.cat([blocks[:, :32] >> bit & 1 for bit in range(8)], 1)
    return _codes_2k(blocks, 32) + 4 * third.float() - 4


def _codes_4k(blocks: torch.Tensor) -> torch.Tensor:
    return _halves(blocks[:, 16:], 32).float()


def _codes_5k(blocks: torch.Tensor) -> torch.Tensor:
    fifth = torch.cat([blocks[:, 16:48] >> bit & 1 for bit in range(8)], 1)
    return (_halves(blocks[:, 48:], 32) | fifth << 4).float()


def _codes_6k(blocks: torch.Tensor) -> torch.Tensor:
    upper = torch.cat(
        [blocks[:, start : start + 32] >> bit & 3 for start in (128, 160) for bit in (0, 2, 4, 6)],
        1,
    )
    return (_halves(blocks[:, :128], 64) | upper << 4).float() - 32


_FUNCTIONS = {
    "Q8_0": (_one_scale, _codes_8, "from_bytes"),
    "Q4_0": (_one_scale, _codes_4, "from_signed_halves"),
    "Q4_K": (_scales_k, _codes_4k, "from_four_bits"),
    "Q5_K": (_scales_k, _codes_5k, "from_five_bits"),
    "Q6_K": (_scales_6, _codes_6k, "from_six_bits"),
    "MXFP4": (_exponent, _codes_mxfp4, "from_float_halves"),
    "Q2_K": (_scales_2, _codes_2k, "from_two_bits"),
    "Q3_K": (_scales_3, _codes_3k, "from_three_bits"),
    "IQ4_NL": (_one_scale, partial(_codes_iq4, start=2), "from_table_halves"),
    "IQ4_XS": (_scales_iq4, partial(_codes_iq4, start=8), "from_table_groups"),
}
GGML: Mapping[str, GgmlBlocks] = {
    form.name: GgmlBlocks(*form, *_FUNCTIONS[form.name]) for form in BLOCKS
}
"""The types of quantised tensors that are read, by ggml's name."""
