"""The parts of an expert that are keys of their own: the whole expert, or the segments of a split
(MoEpic).

`Whole` and `Segments` have the same methods: which keys make up an expert, and what they weigh.
"""

from collections.abc import Collection, Iterable

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.control.pools import Partitions, Pool
from runtime.policies.base import Split


class Whole:
    """Experts in one piece, each with one key. `shares` by key: the part of an expert that the key
    stands for."""

    is_cut = False

    def __init__(self, shape: Shape) -> None:
        self.shares = [1.0] * shape.num_keys
        self._shape = shape

    def of(self, keys: list[int]) -> list[int]:
        """Return the keys that make up experts, in the order of the experts."""
        return keys

    def tops(self, keys: list[int]) -> list[int]:
        """Return those of these keys that eviction policies know."""
        return keys

    def num_bytes(self, keys: Collection[int]) -> int:
        """Return the bytes of keys at full precision."""
        return self._shape.expert_nbytes * len(keys)

    def layer_states(self, state: np.ndarray, layer: int) -> np.ndarray:
        """Return the states [E] of one layer's experts, given the states of all keys."""
        first = layer * self._shape.num_experts
        return state[first : first + self._shape.num_experts]


class Segments:
    """The top of an expert has the expert's own key, its bottom that key plus L * E, as if the
    bottoms were L more layers. An expert of a layer that is not cut is its top.

    `nbytes` and `shares` (parts of an expert) are by key.
    """

    def __init__(self, shape: Shape, split: Split) -> None:
        self._shape = shape
        self.cut(split)

    def cut(self, split: Split) -> None:
        """Apply another split from here on."""
        shape = self._shape
        tops, bottoms = _sizes(shape, split)
        self.nbytes = [size for size in (*tops, *bottoms) for _ in range(shape.num_experts)]
        self.shares = [size / shape.expert_nbytes for size in self.nbytes]
        self._num_keys = shape.num_keys
        self._num_experts = shape.num_experts
        self.is_cut = any(bottoms)
        whole = range(shape.num_keys)
        self._own = [
            (key, key + shape.num_keys) if self.nbytes[key + shape.num_keys] else (key,)
            for key in whole
        ]

    def of(self, keys: list[int]) -> list[int]:
        """Return the segments of experts, in the order of the experts, each top before its
        bottom."""
        return [segment for key in keys for segment in self._own[key]] if self.is_cut else keys

    def is_bottom(self, key: int) -> bool:
        return key >= self._num_keys

    def tops(self, keys: list[int]) -> list[int]:
        return [key for key in keys if key < self._num_keys] if self.is_cut else keys

    def num_bytes(self, keys: Iterable[int]) -> int:
        return sum([self.nbytes[key] for key in keys])

    def layer_states(self, state: np.ndarray, layer: int) -> np.ndarray:
        """Return the states [E] of one layer's experts; an expert has the lower state of its two
        segments."""
        first = layer * self._num_experts
        count = self._num_experts
        tops = state[first : first + count]
        bottom = first + self._num_keys
        return np.minimum(tops, state[bottom : bottom + count]) if self.nbytes[bottom] else tops


def segment_pools(
    shape: Shape, split: Split, *, is_global: bool, partitions: Partitions | None = None
) -> tuple[Pool, ...]:
    """Return the pools of the tops, on each device one a layer or one for all, then those of the
    bottoms of all layers, which are passing.

    Raises BadUsage when layers are cut differently and yet would share their slots.
    """
    partitions = partitions or Partitions(shape.num_experts)
    tops, bottoms = _sizes(shape, split)
    size = shape.num_experts
    num_keys = shape.num_keys
    num_tops = partitions.dealt(split.num_tops)
    dealt = partitions.dealt(np.array([split.num_bottoms]), num_layers=shape.num_layers)[0].tolist()
    passing = [
        Pool(num_keys, 2 * num_keys, count, max(bottoms), is_passing=True, device=device)
        for device, count in enumerate(dealt)
    ]
    if is_global and len(set(tops)) > 1:
        raise BadUsage(
            "the split gives each layer tops of its own size, which no other can hold: use "
            "--scope layer"
        )
    rows = (
        [(0, num_keys, num_tops.sum(axis=0), tops[0])]
        if is_global
        else [
            (layer * size, (layer + 1) * size, counts, nbytes)
            for layer, (counts, nbytes) in enumerate(zip(num_tops, tops, strict=True))
        ]
    )
    staying = [
        Pool(first, stop, count, nbytes, device=device)
        for first, stop, counts, nbytes in rows
        for device, count in enumerate(counts.tolist())
    ]
    return (*staying, *passing)


def _sizes(shape: Shape, split: Split) -> tuple[list[int], list[int]]:
    """Return the bytes of a top and of a bottom, by layer."""
    sizes = [shape.segment_nbytes(neurons) for neurons in split.top_neurons.tolist()]
    return [top for top, _ in sizes], [bottom for _, bottom in sizes]
