"""ggml's blocks, which GGUF files are made of (ggml-common.h, ggml-quants.c).

A row is a sequence of blocks. `w = scale * code - minimum`, with a scale for each group of 32
weights, or of 16 in Q2_K, Q3_K, Q6_K and NVFP4, or of a whole block; Q2_K, Q4_K, Q5_K, Q4_1 and
Q5_1 have a minimum beside it. Every sum and product is rounded to float32. `grids` has the types
IQ1 to IQ3, Q1_0 and Q2_0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from artifacts.formats.base import Loop, loops
from artifacts.formats.codes import E2M1_DOUBLED, IQ4
from artifacts.formats.gguf.blocks import GgmlBlocks, Scales, bits, by_row, half, one_scale
from artifacts.formats.gguf.gguf_header import BLOCKS
from artifacts.formats.gguf.grids import GRIDS

_NAN = 255  # of a scale of MXFP4, which is an exponent


@dataclass(frozen=True, slots=True)
class CodedBlocks(GgmlBlocks):
    """`codes` gives the codes float32 [n, num_weights] of blocks; `fill` is the name of the
    compiled loop."""

    codes: Callable[[torch.Tensor], torch.Tensor] = field(compare=False)
    fill: str | None = field(compare=False, default=None)

    def loop(self, tensors: Mapping[str, torch.Tensor]) -> Loop | None:
        if self.fill is None:
            return None
        blocks = tensors["blocks"]
        scales, minima = self.scales_of(tensors)
        minima = torch.zeros_like(scales) if minima is None else minima
        of_rows = (by_row(each, len(blocks)) for each in (scales, minima))
        return partial(getattr(loops("gguf.ggml_loops"), self.fill), blocks.numpy(), *of_rows)


def _scale_and_minimum(blocks: torch.Tensor) -> Scales:
    return half(blocks, 0), -half(blocks, 2)


def _exponent(blocks: torch.Tensor) -> Scales:
    """MXFP4's scale is half a power of two, as the values of its codes are doubled; NaN where its
    byte says so."""
    powers = torch.tensor(
        [2.0 ** (byte - 128) for byte in range(_NAN)] + [torch.nan], device=blocks.device
    )
    return powers[blocks[:, :1].int()], None


def _unsigned_e4m3(blocks: torch.Tensor) -> Scales:
    """Return NVFP4's scales: half the 8-bit floats of their bytes, as the values of its codes are
    doubled. The upper bit counts only beside the code of NaN, which is 0, or 480 with it."""
    stored = blocks[:, :4]
    scales = (stored & 0x7F).view(torch.float8_e4m3fn).float() / 2
    return torch.where(scales.isnan(), (stored >> 7) * 240.0, scales), None


def _scales_k(blocks: torch.Tensor) -> Scales:
    """Q4_K and Q5_K: a block's scale and minimum times those of its 8 groups, which have six bits
    each in 12 bytes."""
    low, middle, high = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((low & 0x3F, (high & 0xF) | (low >> 2 & 0x30)), 1)
    minima = torch.cat((middle & 0x3F, (high >> 4) | (middle >> 2 & 0x30)), 1)
    return half(blocks, 0) * scales.float(), half(blocks, 2) * minima.float()


def _scales_2(blocks: torch.Tensor) -> Scales:
    """Q2_K: a block's scale and minimum times those of its 16 groups, which have half a byte
    each."""
    of_groups = blocks[:, :16]
    return half(blocks, 80) * (of_groups & 0xF).float(), half(blocks, 82) * (of_groups >> 4).float()


def _scales_3(blocks: torch.Tensor) -> Scales:
    """Q3_K: a block's scale times those of its 16 groups, six bits each in 12 bytes, that are 32
    too large."""
    lower = bits(blocks[:, 96:104], 4, 8)
    upper = bits(blocks[:, 104:108], 2, 4)
    return half(blocks, 108) * ((lower | upper << 4).float() - 32), None


def _scales_iq4(blocks: torch.Tensor) -> Scales:
    """IQ4_XS: as Q3_K, of 8 groups, whose upper bits are in two bytes and lower ones in the next
    four."""
    lower = bits(blocks[:, 4:8], 4)
    upper = bits(blocks[:, 2:4], 2)
    return half(blocks, 0) * ((lower | upper << 4).float() - 32), None


def _scales_6(blocks: torch.Tensor) -> Scales:
    return half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float(), None


def _codes_8(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float()


def _codes_4(blocks: torch.Tensor, start: int, run: int = 16, less: int = 0) -> torch.Tensor:
    return bits(blocks[:, start:], 4, run).float() - less


def _codes_5(blocks: torch.Tensor, start: int, less: int = 0) -> torch.Tensor:
    fifth = bits(blocks[:, start : start + 4], 1)
    return (bits(blocks[:, start + 4 :], 4, 16) | fifth << 4).float() - less


def _codes_of(
    table: Sequence[int], blocks: torch.Tensor, start: int, run: int = 16
) -> torch.Tensor:
    numbers = torch.tensor(table, device=blocks.device).float()
    return numbers[bits(blocks[:, start:], 4, run).int()]


def _codes_ternary(blocks: torch.Tensor) -> torch.Tensor:
    """TQ1_0: five digits to the base 3 in a byte, four in the last bytes, as a fraction of 256."""
    parts = []
    for start, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        packed = blocks[:, start:end].int()
        parts += [(packed * 3**digit & 0xFF) * 3 >> 8 for digit in range(count)]
    return torch.cat(parts, 1).float() - 1


def _codes_2k(blocks: torch.Tensor, start: int = 16) -> torch.Tensor:
    return bits(blocks[:, start : start + 64], 2, 32).float()


def _codes_3k(blocks: torch.Tensor) -> torch.Tensor:
    return _codes_2k(blocks, 32) + 4 * bits(blocks[:, :32], 1, 32).float() - 4


def _codes_5k(blocks: torch.Tensor) -> torch.Tensor:
    return (bits(blocks[:, 48:], 4, 32) | bits(blocks[:, 16:48], 1, 32) << 4).float()


def _codes_6k(blocks: torch.Tensor) -> torch.Tensor:
    return (bits(blocks[:, :128], 4, 64) | bits(blocks[:, 128:192], 2, 32) << 4).float() - 32


_FUNCTIONS = {
    "Q8_0": (one_scale, _codes_8, "from_bytes"),
    "Q4_0": (one_scale, partial(_codes_4, start=2, less=8), "from_halves"),
    "Q4_K": (_scales_k, partial(_codes_4, start=16, run=32), "from_four_bits"),
    "Q5_K": (_scales_k, _codes_5k, "from_four_bits"),
    "Q6_K": (_scales_6, _codes_6k, "from_six_bits"),
    "MXFP4": (_exponent, partial(_codes_of, E2M1_DOUBLED, start=1), "from_float_halves"),
    "Q2_K": (_scales_2, _codes_2k, "from_two_bits"),
    "Q3_K": (_scales_3, _codes_3k, "from_two_bits"),
    "IQ4_NL": (one_scale, partial(_codes_of, IQ4, start=2), "from_table_halves"),
    "IQ4_XS": (_scales_iq4, partial(_codes_of, IQ4, start=8), "from_table_halves"),
    "Q4_1": (_scale_and_minimum, partial(_codes_4, start=4), "from_halves"),
    "Q5_0": (one_scale, partial(_codes_5, start=2, less=16), "from_halves"),
    "Q5_1": (_scale_and_minimum, partial(_codes_5, start=4), "from_halves"),
    "TQ1_0": (partial(one_scale, at=52), _codes_ternary),
    "TQ2_0": (partial(one_scale, at=64), lambda blocks: _codes_2k(blocks, 0) - 1),
    "NVFP4": (
        _unsigned_e4m3,
        partial(_codes_of, E2M1_DOUBLED, start=4, run=8),
        "from_float_halves_of_16",
    ),
}
_CODED = {
    form.name: CodedBlocks(*form, *_FUNCTIONS[form.name])
    for form in BLOCKS
    if form.name in _FUNCTIONS
}
GGML: Mapping[str, GgmlBlocks] = _CODED | GRIDS
"""The types of quantised tensors that are read, by ggml's name."""
