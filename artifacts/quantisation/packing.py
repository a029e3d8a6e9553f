"""Codes of 1 to 8 bits as one little-endian stream of 32-bit words: the layout of GPTQ checkpoints,
version 2.

A column of codes is one stream: code k owns the bits from `k * bits` on, lowest first, and word w
holds the stream's bits 32w to 32w+31. Zero-points are stored unchanged (version 1 of the layout
stored them minus one).
"""

from dataclasses import dataclass

import numpy as np
import torch

PARTS = ("qweight", "qzeros", "scales")
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Packed:
    """One matrix [out, in] at `bits` bits, in groups of `group_size` inputs; its tensors may be
    views of a buffer.

    `qweight` int32 [ceil(in * bits / 32), out]; `scales` float16 [groups, out]; `qzeros` int32
    [groups, ceil(out * bits / 32)], or None at 1 bit. With q the codes and g the group of input k:
    `w[o, k] = scales[g, o] * (q[k, o] - zeros[g, o])`, where the zero of 1 bit is 1/2.
    """

    bits: int
    group_size: int
    num_inputs: int
    qweight: torch.Tensor
    scales: torch.Tensor
    qzeros: torch.Tensor | None

    @property
    def num_outputs(self) -> int:
        return self.qweight.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            part.nbytes for part in (self.qweight, self.qzeros, self.scales) if part is not None
        )


def packed_shapes(
    num_outputs: int, num_inputs: int, bits: int, group_size: int
) -> dict[str, tuple[torch.dtype, tuple[int, int]]]:
    """Type and shape of each tensor of a Packed, by name; no data is needed."""
    num_groups = num_inputs // group_size
    shapes = {
        "qweight": (torch.int32, (num_words(num_inputs, bits), num_outputs)),
        "qzeros": (torch.int32, (num_groups, num_words(num_outputs, bits))),
        "scales": (torch.float16, (num_groups, num_outputs)),
    }
    return {name: shape for name, shape in shapes.items() if bits > 1 or name != "qzeros"}


def num_words(count: int, bits: int) -> int:
    """Words that a stream of `count` codes takes."""
    return -(-count * bits // _WORD_BITS)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Words int32 [ceil(n * bits / 32), m] of codes uint8 [n, m]: a stream along the first axis,
    zeros at its end."""
    count, width = codes.shape
    rows = np.arange(count) * bits
    words = np.zeros((num_words(count, bits) + 1, width), np.uint64)
    for shift in np.unique(rows % _WORD_BITS):
        places = rows % _WORD_BITS == shift
        spread = codes[places].astype(np.uint64) << np.uint64(shift)
        words[rows[places] // _WORD_BITS] |= spread & np.uint64(0xFFFFFFFF)
        words[rows[places] // _WORD_BITS + 1] |= spread >> np.uint64(_WORD_BITS)
    return words[:-1].astype(np.uint32).view(np.int32)


def unpack(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first `count` codes, uint8 [count, m], of each stream in `words` int32 [w, m]."""
    starts = np.arange(count) * bits
    padded = np.vstack([words.view(np.uint32), np.zeros((1, words.shape[1]), np.uint32)])
    index = starts // _WORD_BITS
    shift = starts % _WORD_BITS
    low = padded[index] >> shift[:, None].astype(np.uint32)
    high = padded[index + 1].astype(np.uint64) << (_WORD_BITS - shift[:, None]).astype(np.uint64)
    return ((low | high.astype(np.uint32)) & np.uint32(2**bits - 1)).astype(np.uint8)
