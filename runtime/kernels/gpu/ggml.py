"""Triton functions for matrices of ggml's blocks: the code of each weight, its scale and its
minimum, as artifacts.formats.gguf has their formulas. Importing this module imports triton.

Every element loads the bytes of its own code and scale; those of a block are in the nearest cache.
Shapes: R rows, C columns of a tile.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from artifacts.formats.gguf.grids import grid
from runtime.kernels.gpu.addressing import GRIDS


@cache
def points(device: torch.device) -> torch.Tensor:
    """Return the points of all grids on a device, int8, one grid behind the other."""
    return torch.cat([grid(name).flatten() for name in GRIDS]).to(device)


@triton.jit
def ggml_numbers(
    expert_ptr, points_ptr, rows, columns, is_row, is_column, matrix: tl.constexpr
):  # fmt: skip
    """Return weights at rows [R] and columns [C] of a matrix in blocks, float32: zero where out of
    range."""
    kind: tl.constexpr = matrix.codes.kind
    num_weights: tl.constexpr = 32 if kind == "Q8_0" else 64 if kind == "Q2_0" else 256
    num_blocks: tl.constexpr = matrix.num_inputs // num_weights
    nbytes: tl.constexpr = matrix.codes.nbytes // (matrix.num_outputs * num_blocks)
    places = rows[:, None] * num_blocks + (columns // num_weights)[None, :]
    blocks = expert_ptr + matrix.codes.start + places * nbytes
    k = (columns % num_weights)[None, :]
    is_in = is_row[:, None] & is_column[None, :]
    if kind == "Q8_0":
        codes = _signed(_byte(blocks, 2 + k, is_in))
        weights = codes.to(tl.float32) * _half(blocks, 0, is_in)
    elif kind == "Q2_0":
        codes = (_byte(blocks, 2 + k // 4, is_in) >> 2 * (k % 4)) & 3
        weights = (codes - 1).to(tl.float32) * _half(blocks, 0, is_in)
    elif kind == "Q6_K":
        weights = _six_bits(blocks, k, is_in)
    elif kind == "Q4_K" or kind == "Q5_K":
        weights = _k(blocks, k, is_in, kind == "Q5_K")
    else:
        weights = _on_grid(blocks, points_ptr, k, is_in, kind)
    return weights


@triton.jit
def _byte(blocks, at, is_in):
    """Return the byte `at` of each block, int32."""
    return tl.load(blocks + at, mask=is_in, other=0).to(tl.int32)


@triton.jit
def _half(blocks, at, is_in):
    """Return the float16 at this byte of each block, as float32."""
    place = (blocks + at).to(tl.pointer_type(tl.float16))
    return tl.load(place, mask=is_in, other=0.0).to(tl.float32)


@triton.jit
def _word(blocks, at, is_in):
    """Return the 4 bytes from `at` on, int32; a block begins at a multiple of two."""
    halves = (blocks + at).to(tl.pointer_type(tl.uint16))
    low = tl.load(halves, mask=is_in, other=0).to(tl.int32)
    return low | tl.load(halves + 1, mask=is_in, other=0).to(tl.int32) << 16


@triton.jit
def _signed(codes):
    return (codes ^ 128) - 128


@triton.jit
def _six_bits(blocks, k, is_in):
    run = k % 128 // 32
    low = _byte(blocks, k // 128 * 64 + run % 2 * 32 + k % 32, is_in) >> run // 2 * 4
    high = _byte(blocks, 128 + k // 128 * 32 + k % 32, is_in) >> run * 2
    codes = ((low & 15) | (high & 3) << 4) - 32
    scales = _signed(_byte(blocks, 192 + k // 16, is_in)).to(tl.float32)
    return codes.to(tl.float32) * (_half(blocks, 208, is_in) * scales)


@triton.jit
def _k(blocks, k, is_in, has_fifth: tl.constexpr):
    """Return weights of Q4_K or Q5_K. The product is not merged with the difference, so that both
    are rounded, as in the formula."""
    group = k // 32
    start: tl.constexpr = 48 if has_fifth else 16
    codes = (_byte(blocks, start + group // 2 * 32 + k % 32, is_in) >> group % 2 * 4) & 15
    if has_fifth:
        codes |= ((_byte(blocks, 16 + k % 32, is_in) >> group) & 1) << 4
    scale, minimum = _six_bits_of_group(blocks, group, is_in)
    scales = _half(blocks, 0, is_in) * scale.to(tl.float32)
    minima = _half(blocks, 2, is_in) * minimum.to(tl.float32)
    return tl.fma(codes.to(tl.float32), scales, 0.0) - minima


@triton.jit
def _six_bits_of_group(blocks, group, is_in):
    """Return the scale and the minimum of a group of Q4_K or Q5_K, int32."""
    of_scale = _byte(blocks, 4 + group % 4, is_in)
    of_minimum = _byte(blocks, 8 + group % 4, is_in)
    last = _byte(blocks, 12 + group % 4, is_in)
    is_low = group < 4
    scale = tl.where(is_low, of_scale & 63, (last & 15) | ((of_scale >> 2) & 48))
    minimum = tl.where(is_low, of_minimum & 63, (last >> 4) | ((of_minimum >> 2) & 48))
    return scale, minimum


@triton.jit
def _even(seven):
    """Return signs whose eighth bit makes their number even."""
    odd = seven ^ (seven >> 4)
    odd ^= odd >> 2
    return seven | ((odd ^ (odd >> 1)) & 1) << 7


@triton.jit
def _on_grid(blocks, points_ptr, k, is_in, kind: tl.constexpr):
    """Return weights of a type with a grid: a number of a point, with its sign, times a scale."""
    if kind == "IQ2_XXS":
        first: tl.constexpr = 0
        point = _byte(blocks, 2 + k // 32 * 8 + k % 32 // 8, is_in)
        signs, factor = _signs_and_scale(blocks, 6 + k // 32 * 8, k, is_in)
    elif kind == "IQ2_XS":
        first: tl.constexpr = 256 * 8
        point, signs, factor = _two_bits(blocks, k, is_in)
    elif kind == "IQ3_XXS":
        first: tl.constexpr = 768 * 8
        point = _byte(blocks, 2 + k // 4, is_in)
        signs, factor = _signs_and_scale(blocks, 66 + k // 32 * 4, k, is_in)
        factor *= 2
    elif kind == "IQ2_S":
        first: tl.constexpr = 768 * 8 + 768 * 4
        point, signs, factor = _ten_bits(blocks, k, is_in)
    else:
        first: tl.constexpr = 768 * 8 + 256 * 4
        point, signs, factor = _three_bits(blocks, k, is_in)
    size: tl.constexpr = 4 if kind == "IQ3_XXS" or kind == "IQ3_S" else 8
    codes = tl.load(points_ptr + first + point * size + k % size, mask=is_in, other=0).to(tl.int32)
    codes = tl.where(((signs >> k % 8) & 1) == 1, -codes, codes)
    return codes.to(tl.float32) * (_half(blocks, 0, is_in) * factor)


@triton.jit
def _signs_and_scale(blocks, at, k, is_in):
    """Return the signs of 8 weights, and the factor of a group, from its word at this byte."""
    word = _word(blocks, at, is_in)
    signs = _even((word >> k % 32 // 8 * 7) & 127)
    return signs, (0.5 + ((word >> 28) & 15).to(tl.float32)) * 0.25


@triton.jit
def _two_bits(blocks, k, is_in):
    """Return the points, signs and factors of IQ2_XS."""
    low = _byte(blocks, 2 + k // 8 * 2, is_in)
    high = _byte(blocks, 3 + k // 8 * 2, is_in)
    own = (_byte(blocks, 66 + k // 32, is_in) >> k // 16 % 2 * 4) & 15
    return low | (high & 1) << 8, _even(high >> 1), (0.5 + own.to(tl.float32)) * 0.25


@triton.jit
def _ten_bits(blocks, k, is_in):
    """Return the points, signs and factors of IQ2_S."""
    upper = (_byte(blocks, 66 + k // 32, is_in) >> k // 8 % 4 * 2) & 3
    point = _byte(blocks, 2 + k // 8, is_in) | upper << 8
    own = (_byte(blocks, 74 + k // 32, is_in) >> k // 16 % 2 * 4) & 15
    return point, _byte(blocks, 34 + k // 8, is_in), (0.5 + own.to(tl.float32)) * 0.25


@triton.jit
def _three_bits(blocks, k, is_in):
    """Return the points, signs and factors of IQ3_S."""
    ninth = (_byte(blocks, 66 + k // 32, is_in) >> k % 32 // 4) & 1
    point = _byte(blocks, 2 + k // 4, is_in) | ninth << 8
    own = (_byte(blocks, 106 + k // 64, is_in) >> k // 32 % 2 * 4) & 15
    return point, _byte(blocks, 74 + k // 8, is_in), 1.0 + 2.0 * own.to(tl.float32)
