"""Where an expert's weights lie in its slot, as the GPU kernels take it: whole, split into segments, or low-bit."""

from dataclasses import dataclass
from typing import NamedTuple

from runtime.model.layout import ExpertLayout

WORD = 4  # bytes


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
