"""How experts lie in memory, and the compiled code for each way: whole, cut in two, packed."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from artifacts.quantisation.packing import PARTS, Packed
from runtime.control.plan import Place
from runtime.kernels.load import kernels
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.layout import ExpertLayout
from runtime.tiers.replicas import ReplicaLayout
from runtime.tiers.shadow_replicas import Shadows
from runtime.tiers.slow import SlowTier
from runtime.tiers.slow_split import SegmentTier


class Token(NamedTuple):
    """What kernels take last: the token [H], for each expert its row of `y` [K, H], an array of the weights' type."""

    x: np.ndarray
    rows: np.ndarray
    y: np.ndarray
    like: np.ndarray


class Form(Protocol):
    """Multiplies a token by experts of one form."""

    def multiply(self, places: Sequence[Place], starts: list[int], token: Token) -> None:
        """Add the output of what lies at each of `starts`, addresses, to its row. Only segments look at `places`."""


def forms_of(slow: SlowTier | SegmentTier, shadows: Shadows | None, dtype: torch.dtype) -> dict[int, Form]:
    """By bits, the form of whatever comes from the slow tier or stays in the fast one."""
    if isinstance(slow, SegmentTier):
        return dict.fromkeys(slow.stores, CutExperts(slow))
    layouts = {bits: store.layout for bits, store in slow.stores.items()} | (shadows.layouts if shadows else {})
    return {bits: form_of(layout, dtype) for bits, layout in layouts.items()}


def form_of(layout: ExpertLayout | ReplicaLayout, dtype: torch.dtype) -> Form:
    """For a model of this dtype."""
    return PackedExperts(layout, dtype) if isinstance(layout, ReplicaLayout) else WholeExperts(layout)


class WholeExperts:
    """Experts as the module has them."""

    def __init__(self, layout: ExpertLayout) -> None:
        inner, down = layout.parts
        self._offsets, self._num_neurons = (inner.offset, down.offset), down.shape[1]

    def multiply(self, places: Sequence[Place], starts: list[int], token: Token) -> None:
        inner, down = self._offsets
        addresses = np.array([(start + inner, start + down) for start in starts])
        kernels("cpu.gated").add_whole(addresses, self._num_neurons, *token)


class CutExperts:
    """Segments, a top behind its head."""

    def __init__(self, slow: SegmentTier) -> None:
        itemsize, layout, nbytes = slow.layout.dtype.itemsize, slow.layout, slow.segments.nbytes
        heads = [0 if slow.segments.is_bottom(key) else layout.head * itemsize for key in range(len(nbytes))]
        self._heads = heads
        self._neurons = [(size - head) // (layout.width * itemsize) for size, head in zip(nbytes, heads, strict=True)]

    def multiply(self, places: Sequence[Place], starts: list[int], token: Token) -> None:
        addresses = np.array([start + self._heads[place.key] for place, start in zip(places, starts, strict=True)])
        neurons = np.array([self._neurons[place.key] for place in places])
        kernels("cpu.gated").add_segments(addresses, neurons, *token)


class PackedExperts:
    """Replicas of one width."""

    def __init__(self, layout: ReplicaLayout, dtype: torch.dtype) -> None:
        packed = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8))
        inner, down = packed[GATE_UP], packed[DOWN]
        offsets = {part.name: part.offset for part in layout.parts}
        self._offsets = np.array([_offsets(offsets, name) for name in (GATE_UP, DOWN)])
        self._sizes = np.array([_num_groups(inner), _num_groups(down), down.num_inputs])
        adder = kernels("cpu.gated_packed").packed_adder
        self._add = adder(layout.bits, is_narrow=dtype is torch.bfloat16)

    def multiply(self, places: Sequence[Place], starts: list[int], token: Token) -> None:
        self._add(np.array(starts)[:, None, None] + self._offsets, self._sizes, *token)


def _offsets(offsets: dict[str, int], name: str) -> list[int]:
    """Of words, scales and zero-points; the words' own where there are no zero-points."""
    words, zeros, scales = (offsets.get(f"{name}.{part}") for part in PARTS)
    return [words, scales, words if zeros is None else zeros]


def _num_groups(packed: Packed) -> int:
    return len(packed.scales)
