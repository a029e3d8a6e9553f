"""Compiled loops that turn codes that lie down the inputs into numbers, to the bit as the formulas
in torch.

Importing this module imports numba. Each fills `panel` [n, in], float32 or uint16 for bfloat16,
with the rows of a matrix [out, in] from row `first` on. Vectors go along the outputs, as the codes
lie; blocks of numbers are turned.
"""

import numpy as np

from artifacts.common.bfloat16 import stored_as
from artifacts.common.numba_loops import exact_part, kernel
from artifacts.common.transposition import transpose

u32 = np.uint32
_I32 = "int32[:, ::1]"
_F32 = "float32[:, ::1]"
_PANELS = ("float32[:, ::1]", "uint16[:, ::1]")
# of a block, which stays in a core's cache; 32 codes are a whole number of words
_INPUTS = 128
_OUTPUTS = 256
# numbers between rows of a block: at a distance of a power of two they drive each other out of the
# cache
_APART = 32


@exact_part
def read_codes(words, bits, k, outputs, codes):
    """Write the codes [n] of input k, for a slice of the outputs, of a stream of words [w, out]."""
    place = k * bits // 32
    shift = np.uint32(k * bits % 32)
    mask = np.uint32((1 << bits) - 1)
    low = words[place, outputs]
    for i in range(len(low)):
        codes[i] = u32(u32(low[i]) >> shift) & mask
    if shift + bits > 32:
        high = words[place + 1, outputs]
        rest = u32(32 - shift)
        for i in range(len(high)):
            codes[i] |= u32(u32(high[i]) << rest) & mask


@exact_part
def _scaled(codes, zeros, scales, out):
    for i in range(len(codes)):
        out[i] = stored_as(np.float32(np.int32(codes[i] - zeros[i])) * scales[i], out)


@kernel(
    [
        f"void({_I32}, int64, {_I32}, {_F32}, int64[::1], int64[::1], int64, {panel})"
        for panel in _PANELS
    ],
    nogil=True,
    exact=True,
)
def from_stream(words, bits, zeros, scales, groups, places, first, panel):
    """Integers in a stream of words down the inputs [w, out]: (code - zero) times the scale, both
    [groups, out], where input k lies at places[k], whose group is groups[places[k]]."""
    num_rows, num_columns = panel.shape
    codes = np.empty(_OUTPUTS, np.int32)
    block = np.empty((_INPUTS, _OUTPUTS + _APART), panel.dtype)
    for r in range(0, num_rows, _OUTPUTS):
        count = min(_OUTPUTS, num_rows - r)
        outputs = slice(first + r, first + r + count)
        for c in range(0, num_columns, _INPUTS):
            last = min(c + _INPUTS, num_columns)
            for k in range(c, last):
                read_codes(words, bits, places[k], outputs, codes)
                group = groups[places[k]]
                _scaled(codes[:count], zeros[group, outputs], scales[group, outputs], block[k - c])
            transpose(block[: last - c, :count], panel[r : r + count, c:last])


@exact_part
def _nibbles(words, place, codes):
    """Write the codes [n] at bit 4 `place` of words [n]."""
    shift = np.int32(4 * place)
    for i in range(len(words)):
        codes[i] = np.int32(words[i] >> shift) & np.int32(15)


@kernel(
    [
        f"void({_I32}, int64[::1], int32[:, :, ::1], float32[:, :, ::1], int64, {panel})"
        for panel in _PANELS
    ],
    nogil=True,
    exact=True,
)
def from_words_of_outputs(words, places, zeros, scales, first, panel):
    """Integers of 4 bits, eight outputs in a word [in, out / 8], output i of them at bit 4
    places[i]: (code - zero) times the scale of their group, both [groups, 8, out / 8]. The panel
    begins with the first output of a word."""
    num_rows, num_columns = panel.shape
    width = num_columns // len(scales)
    codes = np.empty(_OUTPUTS, np.int32)
    block = np.empty((_INPUTS, _OUTPUTS + _APART), panel.dtype)
    for w in range(first // 8, (first + num_rows) // 8, _OUTPUTS):
        own = slice(w, min(w + _OUTPUTS, (first + num_rows) // 8))
        rows = panel[8 * w - first : 8 * own.stop - first]
        for i in range(8):
            for c in range(0, num_columns, _INPUTS):
                last = min(c + _INPUTS, num_columns)
                for k in range(c, last):
                    _nibbles(words[k, own], places[i], codes)
                    zero = zeros[k // width, i, own]
                    scale = scales[k // width, i, own]
                    _scaled(codes[: len(zero)], zero, scale, block[k - c])
                transpose(block[: last - c, : own.stop - w], rows[i::8, c:last])


@kernel(
    [f"void({kind}[:, ::1], {kind}[:, :])" for kind in ("float32", "uint16")],
    nogil=True,
    exact=True,
)
def turn(matrix, out):
    """Write the transposed matrix [m, n] to `out` [n, m]."""
    transpose(matrix, out)
