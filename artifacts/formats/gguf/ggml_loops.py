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
def from_signed_halves(blocks, scales, minima, first, panel):
    """Q4_0: a scale of two bytes, and 16 bytes with the codes of 32 weights, the first half of
    these low."""
    for r in range(len(panel)):
        codes = blocks[first + r].ctypes.data
        out = panel[r]
        for half in range(2 * scales.shape[1]):
            at = codes + half // 2 * 18 + 2
            scale = scales[first + r, half // 2]
            shift = 4 * (half % 2)
            write_integers(at, shift, at, 0, 0, 8, scale, _ZERO, out, half)


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
    """IQ4_NL: as Q4_0, of codes that stand for other numbers."""
    for r in range(len(panel)):
        codes = blocks[first + r].ctypes.data
        out = panel[r]
        for half in range(2 * scales.shape[1]):
            at = codes + half // 2 * 18 + 2
            scale = scales[first + r, half // 2]
            shift = 4 * (half % 2)
            write_from_table(at, shift, at, 0, 0, 0, scale, _ZERO, out, half)


@kernel(_SIGNATURES, nogil=True, exact=True)
def from_table_groups(blocks, scales, minima, first, panel):
    """IQ4_XS: 8 bytes of scales, and for each of 8 groups 16 bytes as IQ4_NL has them."""
    for r in range(len(panel)):
        codes = blocks[first + r].ctypes.data
        out = panel[r]
        for half in range(2 * scales.shape[1]):
            group = half // 2
            at = codes + group // 8 * 136 + 8 + group % 8 * 16
            scale = scales[first + r, group]
            shift = 4 * (half % 2)
            write_from_table(at, shift, at, 0, 0, 0, scale, _ZERO, out, half)


@kernel(_SIGNATURES, nogil=True, exact=True)
def from_two_bits(blocks, scales, minima, first, panel):
    """Q2_K: 16 bytes of scales and minima, 64 with the codes of 16 groups of 16 weights, of four
    groups in a byte."""
    for r in range(len(panel)):
        codes = blocks[first + r].ctypes.data
        out = panel[r]
        for group in range(scales.shape[1]):
            g = group % 16
            at = codes + group // 16 * 84 + 16 + g // 8 * 32 + g % 2 * COUNT
            shift = g % 8 // 2 * 2
            scale = scales[first + r, group]
            minimum = minima[first + r, group]
            write_upon_two_bits(at, shift, at, 0, 0, 0, scale, minimum, out, group)


@kernel(_SIGNATURES, nogil=True, exact=True)
def from_three_bits(blocks, scales, minima, first, panel):
    """Q3_K: 32 bytes with the third bits (bit n is of the weights from 32 n on), 64 with the other
    two as in Q2_K."""
    for r in range(len(panel)):
        codes = blocks[first + r].ctypes.data
        out = panel[r]
        for group in range(scales.shape[1]):
            g = group % 16
            thirds = codes + group // 16 * 110 + g % 2 * COUNT
            at = thirds + 32 + g // 8 * 32
            shift = g % 8 // 2 * 2
            scale = scales[first + r, group]
            write_upon_two_bits(at, shift, thirds, g // 2, 1, 4, scale, _ZERO, out, group)


@kernel(_SIGNATURES, nogil=True, exact=True)
def from_four_bits(blocks, scales, minima, first, panel):
    """Q4_K: 16 bytes of scales, 128 with the codes of 8 groups of 32 weights, of two groups in a
    byte."""
    for r in range(len(panel)):
        codes = blocks[first + r].ctypes.data
        out = panel[r]
        for half in range(2 * scales.shape[1]):
            group = half // 2
            side = half % 2 * COUNT
            at = codes + group // 8 * 144 + 16 + group % 8 // 2 * 32 + side
            shift = 4 * (group % 2)
            scale = scales[first + r, group]
            minimum = minima[first + r, group]
            write_integers(at, shift, at, 0, 0, 0, scale, minimum, out, half)


@kernel(_SIGNATURES, nogil=True, exact=True)
def from_five_bits(blocks, scales, minima, first, panel):
    """Q5_K: 16 bytes of scales, 32 with the fifth bits (bit g is of group g), 128 with the other
    four."""
    for r in range(len(panel)):
        codes = blocks[first + r].ctypes.data
        out = panel[r]
        for half in range(2 * scales.shape[1]):
            group = half // 2
            g = half // 2 % 8
            side = half % 2 * COUNT
            fifths = codes + group // 8 * 176 + 16 + side
            at = fifths + 32 + g // 2 * 32
            shift = 4 * (g % 2)
            scale = scales[first + r, group]
            minimum = minima[first + r, group]
            write_integers(at, shift, fifths, g, 1, 0, scale, minimum, out, half)


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
def from_halves_and_bits(blocks, scales, minima, first, panel):
    """Q4_1, Q5_0 and Q5_1: a scale of two bytes, in Q4_1 and Q5_1 a minimum of two; in Q5_0 and
    Q5_1 a word with the fifth bits of 32 weights; 16 bytes as Q4_0 has them."""
    nbytes = blocks.shape[1] // scales.shape[1]
    has_fifths = nbytes != 20
    less = 16 if nbytes == 22 else 0
    fifths = np.zeros(COUNT, np.uint8)
    for r in range(len(panel)):
        row = blocks[first + r]
        out = panel[r]
        for half in range(2 * scales.shape[1]):
            side = half % 2
            at = (half // 2 + 1) * nbytes - 16
            if has_fifths:
                own = row[at - 4 + 2 * side] | row[at - 3 + 2 * side] << 8
                for i in range(COUNT):
                    fifths[i] = own >> i & 1
            codes = row.ctypes.data + at
            scale = scales[first + r, half // 2]
            minimum = minima[first + r, half // 2]
            write_integers(
                codes, 4 * side, fifths.ctypes.data, 0, 1, less, scale, minimum, out, half
            )


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
