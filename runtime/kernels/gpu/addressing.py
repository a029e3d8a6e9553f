"""Where an expert's weights lie in its slot, whole, cut in two or packed, as kernels for a GPU take it."""

from dataclasses import dataclass

from runtime.model.layout import ExpertLayout

WORD = 4  # bytes


@dataclass(frozen=True, slots=True)
class Strides:
    """All in weights: where `gate`, `up` and `down` begin, how far apart rows of gate and up lie, and in down the
    weights of one output and the next, of one neuron and the next. `is_cut`: others may have the rest of its neurons.
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
        """Gate above up, [2 I, H], and down [H, I]."""
        into, out_of = layout.parts
        (rows, hidden), neurons = into.shape, out_of.shape[1]
        assert rows == 2 * neurons, (into.shape, out_of.shape)
        gate, down = (part.offset // layout.dtype.itemsize for part in (into, out_of))
        return cls(neurons, gate, gate + neurons * hidden, down, hidden, neurons, 1, is_cut=False)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Where one packed matrix lies in an expert: its words and zero-points, counted in words of 4 bytes, its scales, in
    halves of one; and how large it is. At 1 bit there are no zero-points, and `zeros` is any place."""

    words: int
    zeros: int
    scales: int
    num_inputs: int
    num_outputs: int
    num_groups: int
    group_size: int
    last_word: int
    zero_words: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """As the kernels take them."""
        return (
            *(self.words, self.zeros, self.scales, self.num_inputs, self.num_outputs),
            *(self.num_groups, self.group_size, self.last_word, self.zero_words),
        )
