"""Compiled loops that turn ggml's blocks into numbers, to the bit as the formulas in torch.

Importing this module imports numba. Each loop fills `panel` [n, in], float32 or uint16 for
bfloat16, with the rows of a matrix [out, in] from row `first` on. It reads `blocks` uint8
[out, bytes of a row] and `scales` and `minima` float32 [out, groups].
"""

import numpy as np

from artifacts.common.bfloat16 import stored_as
from artifacts.common.numba_loops import kernel
from artifacts.formats.codes import E2M1_DOUBLED
from artifacts.formats.gguf.ggml_vectors import (
    COUNT,
    write_floats,
    write_from_table,
    write_integers,
    write_points,
    write_upon_two_bits,
    write_upon_word,
)

_PANELS = ("float32[:, ::1]", "uint16[:, ::1]")
_SIGNATURES = [
    f"void(uint8[:, ::1], float32[:, ::1], float32[:, ::1], int64, {panel})" for panel in _PANELS
]
_ZERO = np.float32(0)
_DOUBLED = np.array(E2M1_DOUBLED, np.int8)


@kernel(_SIGNATURES, nogil=True, exact=True)
def from_bytes(blocks, scales, minima, first, panel):
    """Q8_0: a scale of two bytes and 32 signed bytes."""
    for r in range(len(panel)):
        row = blocks[first + r]
        out = panel[r]
        for block in range(scales.shape[1]):
            scale = scales[first + r, block]
            for i in range(32):
                out[32 * block + i] = stored_as(
                    np.float32(np.int8(row[34 * block + 2 + i])) * scale, out
                )


@kernel(_SIGNATURES, nogil=True, exact=True)
def from_halves(blocks, scales, minima, first, panel):
    """Q4_0, Q4_1, Q5_0 and Q5_1: a scale of two bytes, in Q4_1 and Q5_1 a minimum of two; in Q5_0
    and Q5_1 a word with the fifth bits of 32 weights; 16 bytes with the codes of 32 weights, the
    first half of these low."""
    nbytes = blocks.shape[1] // scales.shape[1]
    has_fifths = nbytes > 20
    less = 16 if nbytes == 22 else 0
    for r in range(len(panel)):
        codes = blocks[first + r].ctypes.data
        out = panel[r]
        for half in range(2 * scales.shape[1]):
            side = half % 2
            at = codes + (half // 2 + 1) * nbytes - 16
            shift = 4 * side
            scale = scales[first + r, half // 2]
            minimum = minima[first + r, half // 2]
            if nbytes == 18:
                write_integers(at, shift, at, 0, 0, 8, scale, _ZERO, out, half)
            else:
                word = at - 4 + 2 * side
                write_upon_word(at, shift, word, 0, has_fifths, less, scale, minimum, out, half)


@kernel(_SIGNATURES, nogil=True, exact=True)
def from_float_halves(blocks, scales, minima, first, panel):
    """MXFP4: a scale of one byte, and 16 bytes as Q4_0 has them."""
    for r in range(len(panel)):
        codes = blocks[first + r].ctypes.data
        out = panel[r]
        for half in range(2 * scales.shape[1]):
            at = codes + half // 2 * 17 + 1
            scale = scales[first + r, half // 2]
            shift = 4 * (half % 2)
            write_floats(at, shift, at, 0, 0, 0, scale, _ZERO, out, half)


@kernel(_SIGNATURES, nogil=True, exact=True)
def from_table_halves(blocks, scales, minima, first, panel):
    """IQ4_NL and IQ4_XS: a scale of two bytes, in IQ4_XS six more for those of 8 groups, and for
    each group 16 bytes as Q4_0 has them, of codes that stand for other numbers."""
    num_together = 1 if blocks.shape[1] == 18 * scales.shape[1] else 8
    start = 2 if num_together == 1 else 8
    for r in range(len(panel)):
        codes = blocks[first + r].ctypes.data
        out = panel[r]
        for half in range(2 * scales.shape[1]):
            group = half // 2
            at = codes + (group // num_together + 1) * start + 16 * group
            scale = scales[first + r, group]
            write_from_table(at, 4 * (half % 2), at, 0, 0, 0, scale, _ZERO, out, half)


@kernel(_SIGNATURES, nogil=True, exact=True)
def from_two_bits(blocks, scales, minima, first, panel):
    """Q2_K and Q3_K: in Q2_K 16 bytes of scales and minima, in Q3_K 32 with the third bits (bit n
    is of the weights from 32 n on); 64 with two bits of 16 groups of 16 weights, of four groups in
    a byte."""
    nbytes = 16 * blocks.shape[1] // scales.shape[1]
    has_thirds = nbytes == 110
    start = 32 if has_thirds else 16
    for r in range(len(panel)):
        codes = blocks[first + r].ctypes.data
        out = panel[r]
        for group in range(scales.shape[1]):
            g = group % 16
            thirds = codes + group // 16 * nbytes + g % 2 * COUNT
            at = thirds + start + g // 8 * 32
            shift = g % 8 // 2 * 2
            scale = scales[first + r, group]
            minimum = minima[first + r, group]
            if has_thirds:
                write_upon_two_bits(at, shift, thirds, g // 2, 1, 4, scale, minimum, out, group)
            else:
                write_upon_two_bits(at, shift, at, 0, 0, 0, scale, minimum, out, group)


@kernel(_SIGNATURES, nogil=True, exact=True)
def from_four_bits(blocks, scales, minima, first, panel):
    """Q4_K and Q5_K: 16 bytes of scales, in Q5_K 32 with the fifth bits (bit g is of group g), 128
    with the other four of 8 groups of 32 weights, of two groups in a byte."""
    nbytes = 8 * blocks.shape[1] // scales.shape[1]
    has_fifths = nbytes == 176
    for r in range(len(panel)):
        codes = blocks[first + r].ctypes.data
        out = panel[r]
        for half in range(2 * scales.shape[1]):
            group = half // 2
            g = group % 8
            fifths = codes + group // 8 * nbytes + 16 + half % 2 * COUNT
            at = fifths + nbytes - 144 + g // 2 * 32
            shift = 4 * (g % 2)
            scale = scales[first + r, group]
            minimum = minima[first + r, group]
            if has_fifths:
                write_integers(at, shift, fifths, g, 1, 0, scale, minimum, out, half)
            else:
                write_integers(at, shift, at, 0, 0, 0, scale, minimum, out, half)


@kernel(_SIGNATURES, nogil=True, exact=True)
def from_six_bits(blocks, scales, minima, first, panel):
    """Q6_K: 128 bytes with the low four bits, 64 with the upper two, 16 scales, a scale of two
    bytes."""
    for r in range(len(panel)):
        codes = blocks[first + r].ctypes.data
        out = panel[r]
        for group in range(scales.shape[1]):
            block = group // 16 * 210
            half = group % 16 // 8
            quarter = group % 8 // 2
            side = group % 2 * COUNT
            lows = codes + block + half * 64 + quarter % 2 * 32 + side
            uppers = codes + block + 128 + half * 32 + side
            shifts = (quarter // 2 * 4, 2 * quarter)
            scale = scales[first + r, group]
            write_integers(lows, shifts[0], uppers, shifts[1], 3, 32, scale, _ZERO, out, group)


@kernel(_SIGNATURES, nogil=True, exact=True)
def from_float_halves_of_16(blocks, scales, minima, first, panel):
    """NVFP4: four scales of a byte, and for each 8 bytes with the codes of 16 weights, as MXFP4 has
    those of 32."""
    for r in range(len(panel)):
        row = blocks[first + r]
        for group in range(scales.shape[1]):
            scale = scales[first + r, group]
            at = group // 4 * 36 + 4 + group % 4 * 8
            out = panel[r, 16 * group : 16 * group + 16]
            for i in range(8):
                out[i] = stored_as(np.float32(_DOUBLED[row[at + i] & 15]) * scale, out)
                out[8 + i] = stored_as(np.float32(_DOUBLED[row[at + i] >> 4]) * scale, out)


@kernel(
    [
        f"void(int16[:, ::1], uint8[:, ::1], float32[:, ::1], int8[:, ::1], int8[:, ::1], int64,"
        f" {panel})"
        for panel in _PANELS
    ],
    nogil=True,
    exact=True,
)
def from_points(points, signs, scales, grid, signs_of_bytes, first, panel):
    """Types with grids: `points` [out, in / 8], or in / 4, are numbers of rows in a grid, which is
    here [n, 4], two rows for a point of 8 weights. Each of `signs` [out, in / 8] is a row of
    `signs_of_bytes` [256, 8]."""
    num_runs = signs.shape[1]
    per_scale = num_runs // scales.shape[1]
    are_wide = points.shape[1] == num_runs
    for r in range(len(panel)):
        of_row = points[first + r]
        for run in range(num_runs):
            one = 2 * of_row[run] if are_wide else of_row[2 * run]
            other = one + 1 if are_wide else of_row[2 * run + 1]
            write_points(
                grid.ctypes.data + 4 * one,
                grid.ctypes.data + 4 * other,
                signs_of_bytes.ctypes.data + 8 * np.int64(signs[first + r, run]),
                scales[first + r, run // per_scale],
                panel[r],
                run,
            )
