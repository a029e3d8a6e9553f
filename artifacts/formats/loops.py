"""Compiled loops that turn stored codes into numbers, to the bit as the formulas of the formats in torch.

Importing this module imports numba. Each fills `panel` float32 [n, in] with the rows of a matrix [out, in] from row
`first` on.
"""

import numpy as np

from artifacts.common.numba_loops import kernel

_U8, _I32, _F32, _PANEL = "uint8[:, ::1]", "int32[:, ::1]", "float32[:, ::1]", "int64, float32[:, ::1]"


@kernel(f"void({_U8}, float32[::1], {_F32}, int64, int64, {_PANEL})", nogil=True, exact=True)
def from_bytes(codes, values, scales, height, width, first, panel):
    """Numbers of 8 bits: values[code] [256] times the scale of their block of `height` rows and `width` columns."""
    num_rows, num_columns = panel.shape
    for r in range(num_rows):
        row, out = codes[first + r], panel[r]
        for block in range(scales.shape[1]):
            scale = scales[(first + r) // height, block]
            for c in range(block * width, min(num_columns, (block + 1) * width)):
                out[c] = values[row[c]] * scale


@kernel(f"void({_U8}, float32[::1], {_F32}, {_PANEL})", nogil=True, exact=True)
def from_half_bytes(codes, values, scales, first, panel):
    """Numbers of 4 bits, the even ones in the low half of a byte: values[code] [16] times the scale of their group."""
    num_bytes = codes.shape[1] // scales.shape[1]
    for r in range(len(panel)):
        row, out = codes[first + r], panel[r]
        for group in range(scales.shape[1]):
            scale = scales[first + r, group]
            for c in range(group * num_bytes, (group + 1) * num_bytes):
                out[2 * c] = values[row[c] & 15] * scale
                out[2 * c + 1] = values[row[c] >> 4] * scale


@kernel(f"void({_I32}, int64, {_I32}, {_F32}, {_PANEL})", nogil=True, exact=True)
def from_row_words(words, bits, zeros, scales, first, panel):
    """Integers of 4 or 8 bits in words along the inputs [out, w]: (code - zero) times the scale of their group, both
    [out, groups]."""
    per_word, mask = 32 // bits, (1 << bits) - 1
    num_words = words.shape[1] // scales.shape[1]
    for r in range(len(panel)):
        row, out = words[first + r], panel[r]
        for group in range(scales.shape[1]):
            zero, scale = zeros[first + r, group], scales[first + r, group]
            for w in range(group * num_words, (group + 1) * num_words):
                for i in range(per_word):
                    out[w * per_word + i] = np.float32(((row[w] >> (i * bits)) & mask) - zero) * scale


@kernel(f"void({_I32}, int64, {_I32}, {_F32}, int64[::1], {_PANEL})", nogil=True, exact=True)
def from_column_words(words, bits, zeros, scales, groups, first, panel):
    """Integers in a stream of words down the inputs [w, out]: (code - zero) times the scale, both [groups, out], where
    input c is of group groups[c]."""
    mask, last = np.uint64((1 << bits) - 1), len(words) - 1
    num_rows, num_columns = panel.shape
    for c in range(0, num_columns, 32):  # whose codes are a whole number of words
        for r in range(num_rows):
            for k in range(c, min(c + 32, num_columns)):
                word, shift, output = k * bits // 32, np.uint64(k * bits % 32), first + r
                low = np.uint64(np.uint32(words[word, output]))
                high = np.uint64(np.uint32(words[min(word + 1, last), output])) << np.uint64(32)
                code = np.int32(((low | high) >> shift) & mask)
                panel[r, k] = np.float32(code - zeros[groups[k], output]) * scales[groups[k], output]


@kernel(f"void({_I32}, int64[::1], {_I32}, {_F32}, {_PANEL})", nogil=True, exact=True)
def from_words_of_outputs(words, places, zeros, scales, first, panel):
    """Integers of 4 bits, eight outputs in a word [in, out / 8], output i of them at bit 4 places[i]: (code - zero)
    times the scale of their group, both [groups, out]."""
    num_rows, num_columns = panel.shape
    width = num_columns // len(scales)
    for c in range(0, num_columns, 16):
        for r in range(num_rows):
            output, place = first + r, 4 * places[(first + r) % 8]
            for k in range(c, min(c + 16, num_columns)):
                code = (words[k, output // 8] >> place) & 15
                panel[r, k] = np.float32(code - zeros[k // width, output]) * scales[k // width, output]
