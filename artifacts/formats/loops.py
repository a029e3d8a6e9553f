"""Compiled loops that turn stored codes into numbers, to the bit as the formulas of the formats in
torch. Importing this module imports numba.

Each fills `panel` [n, in], float32 or uint16 for bfloat16, with the rows of a matrix [out, in] from
row `first` on. The number that a code stands for under a scale is computed once and looked up.
"""

import numpy as np

from artifacts.common.bfloat16 import stored_as
from artifacts.common.lookups import (
    BYTES_STEP,
    HAS_LOOKUPS,
    look_up_bytes,
    look_up_few_half_bytes,
    look_up_half_bytes,
)
from artifacts.common.numba_loops import exact_part, kernel

_U8 = "uint8[:, ::1]"
_I32 = "int32[:, ::1]"
_F32 = "float32[:, ::1]"
_PANELS = ("float32[:, ::1]", "uint16[:, ::1]")


@exact_part
def _from_table(codes, table, out):
    """Write the number [n] of each code [n]."""
    num_fast = len(out) // BYTES_STEP * BYTES_STEP if HAS_LOOKUPS and out.itemsize == 2 else 0
    look_up_bytes(codes.ctypes.data, table.ctypes.data, out.ctypes.data, num_fast)
    for c in range(num_fast, len(out)):
        out[c] = table[codes[c]]


@kernel(
    [f"void({_U8}, float32[::1], {_F32}, int64, int64, int64, {panel})" for panel in _PANELS],
    nogil=True,
    exact=True,
)
def from_bytes(codes, values, scales, height, width, first, panel):
    """Numbers of 8 bits: values[code] [256] times the scale of their block of `height` rows and
    `width` columns."""
    tables = np.empty((scales.shape[1], 256), panel.dtype)
    for r in range(len(panel)):
        if r == 0 or (first + r) % height == 0:
            for block in range(len(tables)):
                scale = scales[(first + r) // height, block]
                for code in range(256):
                    tables[block, code] = stored_as(values[code] * scale, panel)
        for block in range(len(tables)):
            columns = slice(block * width, min(panel.shape[1], (block + 1) * width))
            _from_table(codes[first + r, columns], tables[block], panel[r, columns])


@exact_part
def _half_bytes_in_vectors(codes, values, zero, scale, out, num_bytes):
    """Write the numbers of the codes in `num_bytes` bytes, a multiple of 8; codes and `out` are
    addresses."""
    if num_bytes % 16 == 0:
        look_up_half_bytes(codes, values.ctypes.data, zero, scale, out, num_bytes)
    else:
        look_up_few_half_bytes(codes, values.ctypes.data, zero, scale, out, num_bytes)


@kernel(
    [f"void({_U8}, float32[::1], {_F32}, {_F32}, int64, {panel})" for panel in _PANELS],
    nogil=True,
    exact=True,
)
def from_half_bytes(codes, values, zeros, scales, first, panel):
    """Numbers of 4 bits, the even ones in the low half of a byte: values[code] [16] less the
    zero-point of their group, times its scale, both [out, groups]; `zeros` is empty where there are
    none."""
    num_bytes = codes.shape[1] // scales.shape[1]
    table = np.empty(16, panel.dtype)
    is_fast = HAS_LOOKUPS and panel.itemsize == 2 and num_bytes % 8 == 0
    for r in range(len(panel)):
        row = codes[first + r]
        out = panel[r]
        for group in range(scales.shape[1]):
            zero = zeros[first + r, group] if len(zeros) else np.float32(0)
            scale = scales[first + r, group]
            begin = group * num_bytes
            if is_fast:
                addresses = row.ctypes.data + begin, out.ctypes.data + 4 * begin
                _half_bytes_in_vectors(addresses[0], values, zero, scale, addresses[1], num_bytes)
                continue
            for code in range(16):
                table[code] = stored_as((values[code] - zero) * scale, panel)
            for i in range(begin, begin + num_bytes):
                out[2 * i] = table[row[i] & 15]
                out[2 * i + 1] = table[row[i] >> 4]


@exact_part
def _from_integers(codes, zero, scale, out):
    for c in range(len(codes)):
        out[c] = stored_as((np.float32(codes[c]) - zero) * scale, out)


@kernel(
    [f"void({_U8}, {_F32}, {_F32}, int64, {panel})" for panel in _PANELS], nogil=True, exact=True
)
def from_integers(codes, zeros, scales, first, panel):
    """Integers of 8 bits without sign: (code - zero) times the scale of their group, both [out,
    groups]."""
    width = codes.shape[1] // scales.shape[1]
    for r in range(len(panel)):
        for group in range(scales.shape[1]):
            own = slice(group * width, (group + 1) * width)
            zero = zeros[first + r, group]
            scale = scales[first + r, group]
            _from_integers(codes[first + r, own], zero, scale, panel[r, own])


@kernel(
    [f"void({_I32}, int64, {_F32}, {_F32}, int64[::1], int64, {panel})" for panel in _PANELS],
    nogil=True,
    exact=True,
)
def from_ordered_integers(words, bits, zeros, scales, groups, first, panel):
    """Integers of 4 or 8 bits in words along the inputs [out, w]: (code - zero) times the scale,
    both [out, groups], where input k is of group groups[k]."""
    per_word = 32 // bits
    mask = (1 << bits) - 1
    for r in range(len(panel)):
        row = words[first + r]
        zero = zeros[first + r]
        scale = scales[first + r]
        for k in range(panel.shape[1]):
            code = (row[k // per_word] >> (k % per_word * bits)) & mask
            panel[r, k] = stored_as((np.float32(code) - zero[groups[k]]) * scale[groups[k]], panel)


@kernel([f"void(uint32[::1], {panel})" for panel in _PANELS], nogil=True, exact=True)
def take_places(places, panel):
    """Put the number at places[k] of each row to k."""
    row = np.empty(panel.shape[1], panel.dtype)
    for r in range(len(panel)):
        out = panel[r]
        for k in range(len(out)):  # numba compiles `row[:] = out` for a second longer
            row[k] = out[k]
        for k in range(len(places)):
            out[k] = row[places[k]]
