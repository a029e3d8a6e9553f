"""Matrices of half a bit to 4 bits a weight in trellis codes: layout of the codes, and decoding.

A bitshift trellis with a computed codebook (QTIP, Tseng et al. 2024): every column of a matrix
[out, in] is one circular stream of bits along the outputs, and a weight is a hash of a window of L
bits. Its first bits are its own; the others belong to the rows that follow. A column has h half
bits a row, h from 1 to 8, so row r's window begins at bit `h r // 2`.

The codes hold not W [out, in] but R = W U^T, or V W U^T where outputs are rotated too. U and V are
the rotations of `artifacts.quantisation.trellis.rotation`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
import torch

from artifacts.quantisation.trellis.rotation import rotate_back

STATE_BITS = 12
"""L of the codes that are written."""

READABLE_STATE_BITS = range(8, 17)

ENCODER = 3  # version: replicas of another are not resumed

HALF_BITS = range(1, 9)
"""Half bits a row that a column may have: from one bit for two rows to 4 bits a row."""

PARTS = ("codes", "scale", "high", "row_scales")
BLOCK_ROWS = 32  # padded to: h words of a column belong to so many rows
HIGH_COLUMNS = 16  # columns with half a bit more come in such numbers: whole vectors of a kernel

MULTIPLIER = 2237
_INNER = [1, 3, 5, 7, 9, 11, 14, 16, 18, 20, 22, 25, 27, 29, 32, 34]
_OUTER = [37, 39, 42, 45, 48, 51, 55, 58, 62, 67, 72, 77, 84, 93, 104, 127]
LEVELS = np.array([-level for level in reversed(_INNER + _OUTER)] + _INNER + _OUTER, np.int16)
"""The medians of 64 equally likely parts of Gaussian numbers, in steps that make the last one
127."""

_ORDERS = (37, 45)  # of even and of odd rows
_DEVIATION = 51.9585  # of the levels
_GAINS = (
    0.7,
    0.87,
    0.93,
    0.98,
    1.0,
    1.0,
    1.0,
    1.0,
)  # that of the levels by h, for weights of deviation 1
ROW_STEPS = 32  # row scales by factor 2
_TOGETHER = 64  # columns, whose numbers stay in the cache


@cache
def steps() -> np.ndarray:
    """float32 [9]: what one level is worth at h half bits, of a matrix with the scale 1. [0] is not
    used."""
    return np.array([0.0, *(gain / _DEVIATION for gain in _GAINS)], np.float32)


@cache
def row_factors() -> np.ndarray:
    """float32 [256]: `2^(-u / 32)`, what a row's scale u multiplies."""
    return np.exp2(-np.arange(256) / ROW_STEPS).round(12).astype(np.float32)


@cache
def tables() -> np.ndarray:
    """int16 [2, 64]: the levels in the order in which hashes of even and of odd rows choose
    them."""
    return np.stack([LEVELS[order * np.arange(len(LEVELS)) % len(LEVELS)] for order in _ORDERS])


def hashes(states: np.ndarray, state_bits: int) -> np.ndarray:
    """The upper 6 of the 16 bits of `multiplier * state`, with the states in the upper bits of
    16."""
    return (
        ((states.astype(np.uint32) << np.uint32(16 - state_bits)) * np.uint32(MULTIPLIER)) & 0xFFFF
    ) >> 10


def levels(states: np.ndarray, odd: np.ndarray | int, state_bits: int = STATE_BITS) -> np.ndarray:
    """Return int16 of each state, -127 to 127. `odd` is 1 for states of odd rows and 0 for states
    of even rows.

    A table of 64 behind a product of 16 bits is a third of the work of a sum of hashed bytes, and
    nearer to the limit: docs/lab/decisions.md.
    """
    return tables()[odd, hashes(states, state_bits)]


def num_words(half_bits: int, num_outputs: int) -> int:
    """16-bit words of one column; its stream is exactly as long."""
    return half_bits * -(-num_outputs // BLOCK_ROWS)


def starts(half_bits: int, count: int) -> np.ndarray:
    """int [count]: the bit at which each row's window begins."""
    return half_bits * np.arange(count) // 2


@dataclass(frozen=True, slots=True)
class Trellis:
    """One matrix [out, in]; its tensors may be views of a buffer.

    Columns that are set in `high` have `half_bits + 1` half bits a row, the others `half_bits`.
    `codes` int16 [n] holds first the words of the others, [words, columns] with columns in their
    order, then the words of the high columns. Word w of a column holds bits 16w to 16w+15 of its
    stream, lowest first; the window of the last rows goes on at bit 0. Rows beyond `num_outputs`,
    up to a multiple of 32, stand for nothing.

    `high` uint8 [ceil(in / 8)]: column c has bit c % 8 of byte c // 8; bits beyond the columns are
    not set. `scale` float32 [1]. `row_scales` uint8 [out], or None where outputs are rotated. With
    l the levels and h a column's half bits:
    `R[o, c] = scale * row_factors()[row_scales[o]] * steps()[h] * l[o, c]`.
    """

    half_bits: int
    state_bits: int
    num_outputs: int
    codes: torch.Tensor
    high: torch.Tensor
    scale: torch.Tensor
    row_scales: torch.Tensor | None
    num_inputs: int

    @property
    def is_rotated(self) -> bool:
        """True if outputs are rotated: then W x = V^T (R (U x)), and else W x = R (U x)."""
        return self.row_scales is None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            part.nbytes
            for part in (self.codes, self.high, self.scale, self.row_scales)
            if part is not None
        )

    def packed(self) -> "Trellis":
        """The matrix as files have it, which it is already."""
        return self

    def is_high(self) -> np.ndarray:
        """bool [in]: which columns have half a bit more."""
        return np.unpackbits(self.high.numpy(), count=self.num_inputs, bitorder="little").astype(
            bool
        )

    def blocks(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield for both kinds of columns the half bits, the columns int [n] in order, and their
        words int16 [words, n]."""
        is_high = self.is_high()
        words = self.codes.numpy()
        for half_bits, columns in (
            (self.half_bits, np.flatnonzero(~is_high)),
            (self.half_bits + 1, np.flatnonzero(is_high)),
        ):
            size = num_words(half_bits, self.num_outputs) * len(columns)
            yield (
                half_bits,
                columns,
                words[:size].reshape(-1, len(columns)) if size else words[:0].reshape(0, 0),
            )
            words = words[size:]

    def rotated(self) -> np.ndarray:
        """R, float32 [out, in]."""
        matrix = np.empty((self.num_outputs, self.num_inputs), np.float32)
        for half_bits, columns, words in self.blocks():
            for first in range(0, len(columns), _TOGETHER):
                part = slice(first, first + _TOGETHER)
                found = states(words[:, part], half_bits, self.num_outputs, self.state_bits)
                for odd, worth in enumerate(_worth(half_bits, self.state_bits)):
                    matrix[odd::2, columns[part]] = worth.take(found[odd::2])
        if self.row_scales is not None:
            matrix *= row_factors()[self.row_scales.numpy()][:, None]
        return matrix * self.scale.numpy()

    def dequantised(self) -> torch.Tensor:
        """W, float32 [out, in]."""
        matrix = rotate_back(self.rotated())
        return torch.from_numpy(
            np.ascontiguousarray(rotate_back(matrix.T).T) if self.is_rotated else matrix
        )


def states(words: np.ndarray, half_bits: int, num_outputs: int, state_bits: int) -> np.ndarray:
    """The windows uint32 [out, n] of the columns whose words are int16 [w, n]."""
    first, shift = np.divmod(starts(half_bits, num_outputs), 16)
    streams = words.view(np.uint16).astype(np.uint32)
    both = streams[first] | streams[(first + 1) % len(streams)] << np.uint32(16)
    return (both >> shift[:, None].astype(np.uint32)) & np.uint32(2**state_bits - 1)


def pack(states: np.ndarray, half_bits: int) -> np.ndarray:
    """The words int16 [w, n] of states [rows, n] along paths: each row's own bits, its lowest. Rows
    are a multiple of 32."""
    bit = np.arange(half_bits * len(states) // 2)
    first = starts(half_bits, len(states))
    row = np.searchsorted(first, bit, side="right") - 1
    shift = (bit - first[row])[:, None].astype(np.uint16)
    words = np.empty((len(bit) // 16, states.shape[1]), np.int16)
    for begin in range(0, states.shape[1], _TOGETHER):
        own = np.ascontiguousarray(states[:, begin : begin + _TOGETHER])
        octets = np.packbits((own[row] >> shift & 1).astype(np.uint8), axis=0, bitorder="little")
        octets = octets.reshape(len(words), 2, -1)
        words[:, begin : begin + _TOGETHER] = (
            octets[:, 0] | octets[:, 1].astype(np.uint16) << np.uint16(8)
        ).view(np.int16)
    return words


def trellis_shapes(
    num_outputs: int, num_inputs: int, half_bits: int, num_high: int, *, is_rotated: bool
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the type and shape of each tensor of a Trellis with `num_high` high columns, by name;
    no data is needed."""
    low, high = (num_words(half_bits + more, num_outputs) for more in (0, 1))
    shapes = {
        "codes": (torch.int16, (low * (num_inputs - num_high) + high * num_high,)),
        "scale": (torch.float32, (1,)),
        "high": (torch.uint8, (-(-num_inputs // 8),)),
        "row_scales": (torch.uint8, (num_outputs,)),
    }
    return {name: shape for name, shape in shapes.items() if name != "row_scales" or not is_rotated}


@cache
def fitting(num_outputs: int, num_inputs: int, bits: float, *, is_rotated: bool) -> tuple[int, int]:
    """Half bits, and the number of columns with half a bit more, of the largest Trellis that takes
    at most `bits` a weight in all; of the smallest where none does."""
    most_bytes = bits * num_outputs * num_inputs / 8
    best = HALF_BITS[0], 0
    for half_bits in HALF_BITS:
        for num_high in range(0, num_inputs + 1 if half_bits < HALF_BITS[-1] else 1, HIGH_COLUMNS):
            shapes = trellis_shapes(
                num_outputs, num_inputs, half_bits, num_high, is_rotated=is_rotated
            )
            if sum(dtype.itemsize * prod(shape) for dtype, shape in shapes.values()) <= most_bytes:
                best = half_bits, num_high
    return best


@cache
def _worth(half_bits: int, state_bits: int) -> np.ndarray:
    """float32 [2, states]: what each state of even and of odd rows stands for, in a matrix with the
    scale 1."""
    return steps()[half_bits] * np.stack(
        [levels(np.arange(2**state_bits), odd, state_bits) for odd in (0, 1)]
    )
