"""Split experts as the controller sees them: keys, bytes and pools of segments (MoEpic)."""

from collections.abc import Iterable
from itertools import islice

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.cache import RESIDENT, Cache
from runtime.policies.base import Split
from runtime.pools import Pool


class Segments:
    """The top of an expert has the expert's own key, its bottom that key plus L * E, as if the bottoms were L more
    layers; an expert of a layer that is not cut is its top. `nbytes` and `shares`, of an expert, are by key."""

    def __init__(self, shape: Shape, split: Split) -> None:
        tops, bottoms = _sizes(shape, split)
        self.nbytes = [size for size in (*tops, *bottoms) for _ in range(shape.num_experts)]
        self.shares = [size / shape.expert_nbytes for size in self.nbytes]
        num_keys, self._num_experts = shape.num_keys, shape.num_experts
        self._own = [(key, num_keys + key) if self.nbytes[num_keys + key] else (key,) for key in range(num_keys)]
        self._passing: dict[int, None] = {}  # bottoms in the fast tier, the longest untouched first

    def of(self, keys: Iterable[int]) -> list[int]:
        """The segments of experts, in their order, each top before its bottom."""
        return [segment for key in keys for segment in self._own[key]]

    def layer_states(self, state: np.ndarray, layer: int) -> np.ndarray:
        """[E] states of one layer's experts: that of the segment which is least there."""
        first, count = layer * self._num_experts, self._num_experts
        tops = state[first : first + count]
        first += len(self._own)
        return np.minimum(tops, state[first : first + count]) if self.nbytes[first] else tops

    def is_bottom(self, key: int) -> bool:
        return key >= len(self._own)

    def num_bytes(self, keys: Iterable[int]) -> int:
        return sum([self.nbytes[key] for key in keys])

    # Bottoms that pass through: no policy is asked about them

    def come(self, key: int) -> None:
        self._passing[key] = None

    def touch(self, keys: Iterable[int]) -> None:
        """Those of these segments that pass are in use."""
        for key in keys:
            if key in self._passing:
                del self._passing[key]
                self._passing[key] = None

    def leave(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._passing.pop(key, None)

    def oldest(self, cache: Cache, count: int) -> list[int]:
        """Up to `count` that may leave, the longest untouched first."""
        states, pinned = cache.states, cache.pins
        return list(islice((key for key in self._passing if states[key] == RESIDENT and not pinned[key]), count))


def segment_pools(shape: Shape, split: Split, *, is_global: bool) -> tuple[Pool, ...]:
    """The tops' pools, one a layer or one for all, then that of the bottoms of every layer.

    Raises BadUsage where layers are cut differently and yet would share their slots.
    """
    tops, bottoms = _sizes(shape, split)
    size, num_keys = shape.num_experts, shape.num_keys
    passing = Pool(num_keys, 2 * num_keys, split.num_bottoms, max(bottoms), is_passing=True)
    if not is_global:
        layers = enumerate(zip(split.num_tops.tolist(), tops, strict=True))
        return (*(Pool(layer * size, (layer + 1) * size, count, nbytes) for layer, (count, nbytes) in layers), passing)
    if len(set(tops)) > 1:
        raise BadUsage("the split gives each layer tops of its own size, which no other can hold: use --scope layer")
    return Pool(0, num_keys, int(split.num_tops.sum()), tops[0]), passing


def _sizes(shape: Shape, split: Split) -> tuple[list[int], list[int]]:
    """Bytes of a top and of a bottom, by layer."""
    sizes = [shape.segment_nbytes(neurons) for neurons in split.top_neurons.tolist()]
    return [top for top, _ in sizes], [bottom for _, bottom in sizes]
