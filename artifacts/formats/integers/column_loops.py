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


@kernel(
    [f"void({kind}[:, ::1], {kind}[:, :])" for kind in ("float32", "uint16")],
    nogil=True,
    exact=True,
)
def turn(matrix, out):
    """Write the transposed matrix [m, n] to `out` [n, m]."""
    transpose(matrix, out)
