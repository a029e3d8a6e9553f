"""Compiled loops that turn ggml's blocks into numbers, to the bit as the formulas in torch.

Importing this module imports numba. Each fills `panel` float32 [n, in] with the rows of a matrix [out, in] from row
`first` on, from `blocks` uint8 [out, bytes of a row] and `scales` and `minima` float32 [out, groups].
"""

import numpy as np

from artifacts.common.numba_loops import kernel

_BLOCKS = "uint8[:, ::1], float32[:, ::1], float32[:, ::1]"
_PANEL = "int64, float32[:, ::1]"


@kernel(f"void({_BLOCKS}, {_PANEL})", nogil=True, exact=True)
def from_bytes(blocks, scales, minima, first, panel):
    """Q8_0: a scale of two bytes and 32 signed bytes."""
    for r in range(len(panel)):
        row, out = blocks[first + r], panel[r]
        for block in range(scales.shape[1]):
            scale = scales[first + r, block]
            for i in range(32):
                out[32 * block + i] = np.float32(np.int8(row[34 * block + 2 + i])) * scale


@kernel(f"void({_BLOCKS}, int64, float32[::1], {_PANEL})", nogil=True, exact=True)
def from_halves(blocks, scales, minima, start, values, first, panel):
    """Q4_0 and MXFP4: a scale of `start` bytes, and 16 bytes with the codes of 32 weights, the first half of these low;
    `values` [16] has the number of each code."""
    for r in range(len(panel)):
        row, out = blocks[first + r], panel[r]
        for block in range(scales.shape[1]):
            scale, codes = scales[first + r, block], (start + 16) * block + start
            for i in range(16):
                out[32 * block + i] = values[row[codes + i] & 15] * scale
                out[32 * block + 16 + i] = values[row[codes + i] >> 4] * scale


@kernel(f"void({_BLOCKS}, {_PANEL})", nogil=True, exact=True)
def from_four_bits(blocks, scales, minima, first, panel):
    """Q4_K: 16 bytes of scales, 128 with the codes of 8 groups of 32 weights, of two groups in a byte."""
    for r in range(len(panel)):
        row, out = blocks[first + r], panel[r]
        for group in range(scales.shape[1]):
            codes, shift = group // 8 * 144 + 16 + group % 8 // 2 * 32, 4 * (group % 2)
            scale, minimum = scales[first + r, group], minima[first + r, group]
            for i in range(32):
                out[32 * group + i] = np.float32(row[codes + i] >> shift & 15) * scale - minimum


@kernel(f"void({_BLOCKS}, {_PANEL})", nogil=True, exact=True)
def from_five_bits(blocks, scales, minima, first, panel):
    """Q5_K: 16 bytes of scales, 32 with the fifth bits (bit g is of group g), 128 with the other four."""
    for r in range(len(panel)):
        row, out = blocks[first + r], panel[r]
        for group in range(scales.shape[1]):
            block, g = group // 8 * 176, group % 8
            scale, minimum = scales[first + r, group], minima[first + r, group]
            for i in range(32):
                low = row[block + 48 + g // 2 * 32 + i] >> (4 * (g % 2)) & 15
                fifth = row[block + 16 + i] >> g & 1
                out[32 * group + i] = np.float32(low | fifth << 4) * scale - minimum


@kernel(f"void({_BLOCKS}, {_PANEL})", nogil=True, exact=True)
def from_six_bits(blocks, scales, minima, first, panel):
    """Q6_K: 128 bytes with the low four bits, 64 with the upper two, 16 scales, a scale of two bytes."""
    for r in range(len(panel)):
        row, out, scale = blocks[first + r], panel[r], scales[first + r]
        for run in range(len(scale) // 4):  # 16 bytes of the upper bits: weights of four groups
            half, side = run // 2, 16 * (run % 2)
            lows, uppers = half // 2 * 210 + half % 2 * 64 + side, half // 2 * 210 + 128 + half % 2 * 32 + side
            c, g = 128 * half + side, 8 * half + run % 2
            for i in range(16):
                one, two, upper = row[lows + i], row[lows + 32 + i], row[uppers + i]
                out[c + i] = np.float32(np.int64(one & 15 | (upper & 3) << 4) - 32) * scale[g]
                out[c + 32 + i] = np.float32(np.int64(two & 15 | (upper >> 2 & 3) << 4) - 32) * scale[g + 2]
                out[c + 64 + i] = np.float32(np.int64(one >> 4 | (upper >> 4 & 3) << 4) - 32) * scale[g + 4]
                out[c + 96 + i] = np.float32(np.int64(two >> 4 | upper >> 6 << 4) - 32) * scale[g + 6]
