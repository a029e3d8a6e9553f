"""Where an expert's weights lie in its slot, as the GPU kernels take it: whole, split into segments, or low-bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from runtime.model.layout import ExpertLayout

WORD = 4  # bytes
MOST_RANKS = 16
_NO_NUMBER = (1 << 15) - 1
_NONE = (1 << 62,) * (MOST_RANKS // 4)


@dataclass(frozen=True, slots=True)
class Strides:
    """Where one expert or segment of full precision lies, all in weights.

    `gate`, `up` and `down` are where each matrix begins; `row` is the distance between rows of gate and up; `output`
    and `neuron` are the distances in down between outputs and between neurons. `is_cut`: a segment, whose expert may
    have neurons elsewhere.
    """

    neurons: int
    gate: int
    up: int
    down: int
    row: int
    output: int
    neuron: int
    is_cut: bool

    @classmethod
    def whole(cls, layout: ExpertLayout) -> "Strides":
        """Return the strides of a whole expert: gate above up, [2 I, H], and down [H, I]."""
        gate_up, down = layout.parts
        (rows, hidden), neurons = gate_up.shape, down.shape[1]
        assert rows == 2 * neurons, (gate_up.shape, down.shape)
        gate, down_start = (part.offset // layout.dtype.itemsize for part in (gate_up, down))
        return cls(neurons, gate, gate + neurons * hidden, down_start, hidden, neurons, 1, is_cut=False)


class Matrix(NamedTuple):
    """Where one low-bit matrix lies in an expert, and its sizes, in the order of the kernels' parameters.

    `words` and `zeros` are in words of 4 bytes, `scales` in halves of a word. At 1 bit there are no zero-points, and
    `zeros` is any place.
    """

    words: int
    zeros: int
    scales: int
    num_inputs: int
    num_outputs: int
    num_groups: int
    group_size: int
    last_word: int
    zero_words: int


@dataclass(frozen=True, slots=True)
class RankNumbers:
    """The numbers of one token's experts by rank, -1 for none, as a kernel's own arguments: nothing is copied to the
    device. Four are in each of `words`, 15 bits each; bit 62 is set, so that each word is of 64 bits."""

    top_k: int
    words: tuple[int, ...]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "RankNumbers | None":
        """None where there are too many, or one is too large."""
        if len(numbers) > MOST_RANKS or max(numbers) >= _NO_NUMBER:
            return None
        words = [1 << 62] * (MOST_RANKS // 4)
        for rank, number in enumerate(numbers):
            words[rank // 4] |= (number if number >= 0 else _NO_NUMBER) << 15 * (rank % 4)
        return cls(len(numbers), tuple(words))


Numbers = torch.Tensor | RankNumbers  # [T, K], or those of one token


def arguments(numbers: Numbers, any_tensor: torch.Tensor) -> tuple[int, int, tuple, bool]:
    """The ranks and pairs of `numbers`, what a kernel takes of them, and whether they are packed in its arguments."""
    if isinstance(numbers, RankNumbers):
        return numbers.top_k, numbers.top_k, (any_tensor, *numbers.words), True
    return numbers.shape[1], numbers.numel(), (numbers, *_NONE), False
