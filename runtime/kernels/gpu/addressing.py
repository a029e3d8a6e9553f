"""Layout of an expert's weights in its slot, as the GPU kernels take it: whole, split into
segments, low-bit, or as published."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from artifacts.formats.gguf.ggml import GGML
from runtime.kernels.gates import SILU, Gate
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.layout import ExpertLayout
from runtime.model.quantised.stored_matrix import StoredMatrix, is_described, stored_matrices

WORD = 4  # bytes
_BIAS = "_bias"  # the end of a bias's name
MOST_RANKS = 16
GRIDS = ("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ3_S", "IQ2_S")
BLOCKS = ("Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q2_0", *GRIDS)
"""ggml's types that the kernels read, those with grids last."""
_NO_NUMBER = (1 << 15) - 1
_NONE = (1 << 62,) * (MOST_RANKS // 4)
_FILL = -1, -1, -1


class Biases(NamedTuple):
    """Places of biases, in weights: the beginnings of gate's and up's, with the distance between
    neurons, and the beginning of down's, None in a segment without it."""

    gate: int
    up: int
    neuron: int
    down: int | None


_NO_BIASES = Biases(0, 0, 0, None)


@dataclass(frozen=True, slots=True)
class Strides:
    """Layout of one expert or segment of full precision, all in weights.

    `gate`, `up` and `down` are the beginnings of the matrices. `row` and `column` are the distances
    in gate and in up between neurons and between inputs; `output` and `neuron` are those in down
    between outputs and between neurons. `is_cut`: a segment, whose expert may have neurons
    elsewhere. `are_paired`: up of a neuron follows its gate, a row behind it, and `row` is half the
    distance between neurons.
    """

    neurons: int
    gate: int
    up: int
    down: int
    row: int
    output: int
    neuron: int
    is_cut: bool
    column: int = 1
    are_paired: bool = False
    biases: Biases | None = None

    @classmethod
    def whole(
        cls, layout: ExpertLayout, *, is_transposed: bool = False, are_paired: bool = False
    ) -> "Strides":
        """Return the strides of a whole expert: gate above up, [2 I, H], or alternating with it, or
        up alone, [I, H]; and down [H, I]. `is_transposed`: each matrix is [in, out]."""
        starts = {part.name: part.offset // layout.dtype.itemsize for part in layout.parts}
        inner_start, down_start = (
            start for name, start in starts.items() if not name.endswith(_BIAS)
        )
        inner, down = (part.shape for part in layout.parts if not part.name.endswith(_BIAS))
        (rows, hidden), neurons = (inner[::-1], down[0]) if is_transposed else (inner, down[1])
        assert rows in (neurons, 2 * neurons), (inner, down)
        (row, column), (neuron, output) = (
            ((1, rows), (hidden, 1)) if is_transposed else ((hidden, 1), (1, neurons))
        )
        apart = row if are_paired else neurons * row
        biases = [start for name, start in starts.items() if name.endswith(_BIAS)]
        return cls(
            neurons,
            inner_start,
            inner_start + apart,
            down_start,
            row,
            output,
            neuron,
            is_cut=False,
            column=column,
            are_paired=are_paired,
            biases=_whole_biases(*biases, neurons, are_paired=are_paired) if biases else None,
        )

    @property
    def inner(self) -> tuple[int, ...]:
        """Kernel arguments for gate and up."""
        gate, up, neuron, _ = self.biases or _NO_BIASES
        return self.gate, self.up, self.row, self.column, gate, up, neuron

    @property
    def outer(self) -> tuple[int, ...]:
        """Kernel arguments for down."""
        return self.down, self.output, self.neuron, (self.biases or _NO_BIASES).down or 0

    @property
    def has_down_bias(self) -> bool:
        return self.biases is not None and self.biases.down is not None


def _whole_biases(inner: int, down: int, neurons: int, *, are_paired: bool) -> Biases:
    return (
        Biases(inner, inner + 1, 2, down) if are_paired else Biases(inner, inner + neurons, 1, down)
    )


class Matrix(NamedTuple):
    """Layout of one low-bit matrix in an expert, and its sizes, in the order of the kernels'
    parameters.

    `words` and `zeros` are in words of 4 bytes, `scales` in halves of a word. At 1 bit there are no
    zero-points, and `zeros` is any place.
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
class GatedMatrices:
    """Matrices of a gated expert, and its activation. If gate and up are one matrix, both fields
    are that matrix; up begins with row `up_first`, and `step` is the distance between rows of
    either."""

    gate: StoredMatrix
    up: StoredMatrix
    up_first: int
    step: int
    down: StoredMatrix
    activation: Gate


def is_readable(layout: ExpertLayout) -> bool:
    """Return whether the kernels read all matrices of experts with this layout, where down is
    one."""
    are_read = all(
        is_described(part) and (part.format.name in BLOCKS or part.format.name not in GGML)
        for part in layout.parts
        if part.format
    )
    return are_read and {part.source for part in layout.parts if part.name == DOWN} == {0}


def gated_matrices(layout: ExpertLayout, activation: Gate = SILU) -> GatedMatrices:
    """Describe the matrices of an expert with this layout."""
    gate, *up = stored_matrices(layout, GATE_UP)
    (down,) = stored_matrices(layout, DOWN)
    up_first, step = (1, 2) if activation.take_turns else (0 if up else gate.num_outputs // 2, 1)
    return GatedMatrices(gate, up[0] if up else gate, up_first, step, down, activation)


class RankNumbers(NamedTuple):
    """Numbers of one token's experts by rank, -1 for none, as a kernel's own arguments: nothing is
    copied to the device. Each of `words` holds four numbers of 15 bits; bit 62 is set, so that each
    word is of 64 bits."""

    top_k: int
    words: tuple[int, ...]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "RankNumbers | None":
        """Return the packed numbers, or None if there are too many, or one is too large."""
        count = len(numbers)
        if count > MOST_RANKS or max(numbers) >= _NO_NUMBER:
            return None
        # -1 becomes _NO_NUMBER by its low bits
        low = _NO_NUMBER
        padded = [*numbers, *_FILL[: -count % 4]]
        words = []
        for rank in range(0, count, 4):
            a, b, c, d = padded[
                rank : rank + 4
            ]  # halves first: small numbers take Python less time
            words.append((c & low | (d & low) << 15 | 1 << 32) << 30 | a & low | (b & low) << 15)
        return cls(count, (*words, *_NONE[len(words) :]))


Numbers = torch.Tensor | RankNumbers  # [T, K], or those of one token


def arguments(numbers: Numbers, any_tensor: torch.Tensor) -> tuple[int, int, tuple, bool]:
    """Return the ranks and pairs of `numbers`, the kernel arguments for them, and whether they are
    packed in these arguments."""
    if isinstance(numbers, RankNumbers):
        return numbers.top_k, numbers.top_k, (any_tensor, *numbers.words), True
    return numbers.shape[1], numbers.numel(), (numbers, *_NONE), False
