"""How experts lie on a GPU, and the kernels for each way: whole, cut in two, packed."""

from collections.abc import Sequence
from typing import Protocol

import torch

from artifacts.quantisation.packing import PARTS, Packed
from artifacts.shape import FULL_BITS
from runtime.control.plan import NO_SLOT, Place
from runtime.kernels.gpu.addressing import WORD, Matrix, Strides
from runtime.kernels.load import kernels
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.layout import ExpertLayout
from runtime.tiers.fast import Resident
from runtime.tiers.neuron_major import NeuronLayout
from runtime.tiers.replicas import ReplicaLayout
from runtime.tiers.slow_split import SegmentTier


class Form(Protocol):
    """Multiplies a few tokens by experts of one form, each found by its number."""

    def number(self, place: Place) -> int: ...

    def multiply(self, x: torch.Tensor, numbers: torch.Tensor, y: torch.Tensor) -> None:
        """Write y [T * K, H] float32 of x [T, H], where numbers [T, K] are not below zero."""


class FullPrecision:
    """Experts or segments in slots, `starts` counted in weights from the beginning of the `arena`."""

    def __init__(self, arena: torch.Tensor, starts: torch.Tensor, strides: Strides) -> None:
        self._arena, self._starts, self._strides = arena, starts, strides

    def number(self, place: Place) -> int:
        return place.slot

    def starts(self, slots: Sequence[int]) -> torch.Tensor:
        """Of what lies in these."""
        return self._starts[torch.tensor(slots, device=self._starts.device)]

    def multiply(
        self, x: torch.Tensor, numbers: torch.Tensor, y: torch.Tensor, *, starts: torch.Tensor | None = None
    ) -> None:
        """`starts`: of experts, where `numbers` are not those of slots."""
        starts = self._starts if starts is None else starts
        kernels("gpu.gated").multiply(x, numbers, starts, self._arena, strides=self._strides, y=y)

    def multiply_tiles(
        self,
        x: torch.Tensor,
        order: torch.Tensor,
        tiles: torch.Tensor,
        y: torch.Tensor,
        *,
        top_k: int,
        block_tokens: int,
    ) -> None:
        """Many tokens, sorted by expert: see `runtime.kernels.gpu.gated_tiles`."""
        kernels("gpu.gated_tiles").multiply(
            x,
            order,
            tiles,
            self._starts,
            self._arena,
            top_k=top_k,
            block_tokens=block_tokens,
            strides=self._strides,
            y=y,
        )


class PackedExperts:
    """Replicas of one width in `buffer`, uint8, `starts` counted in bytes: by slot, or by key where they stay."""

    def __init__(self, layout: ReplicaLayout, buffer: torch.Tensor, starts: Sequence[int], *, is_by_key: bool) -> None:
        self._bits, self._buffer, self._is_by_key = layout.bits, buffer, is_by_key
        self._starts = torch.tensor([start // WORD for start in starts], device=buffer.device)
        self._gate_up, self._down = (packed_matrix(layout, name) for name in (GATE_UP, DOWN))

    def number(self, place: Place) -> int:
        return place.key if self._is_by_key else place.slot

    def multiply(self, x: torch.Tensor, numbers: torch.Tensor, y: torch.Tensor) -> None:
        own = {"bits": self._bits, "gate_up": self._gate_up, "down": self._down}
        kernels("gpu.gated_packed").multiply(x, numbers, self._starts, self._buffer, **own, y=y)


class Forms:
    """Which form what lies at a place has; `full`: that of a whole expert, None where experts are cut."""

    def __init__(self, resident: Resident) -> None:
        slots, slow, shadows = resident.slots, resident.slow, resident.shadows
        self._num_experts = resident.num_experts
        layout = slow.stores[FULL_BITS].layout
        arena = slots.arena.view(layout.dtype)
        starts = _in_weights(slots.starts, layout.dtype, slots.device)
        self.full = self._packed = None
        if isinstance(slow, SegmentTier):
            self._segments = _segments(slow, self._num_experts, arena, starts)
            return
        self.full = FullPrecision(arena, starts, Strides.whole(layout))
        low = {bits: store.layout for bits, store in slow.stores.items() if bits != FULL_BITS}
        self._packed = {
            (bits, False): PackedExperts(own, slots.arena, slots.starts, is_by_key=False) for bits, own in low.items()
        }
        for bits, own in (shadows.layouts if shadows else {}).items():
            self._packed[bits, True] = PackedExperts(own, shadows.buffer, shadows.starts, is_by_key=True)

    @property
    def are_cut(self) -> bool:
        return self.full is None

    def of(self, place: Place) -> Form:
        if self.are_cut:
            return self._segments[place.key // self._num_experts]
        return self.full if place.bits == FULL_BITS else self._packed[place.bits, place.slot == NO_SLOT]


def _segments(
    slow: SegmentTier, num_experts: int, arena: torch.Tensor, starts: torch.Tensor
) -> dict[int, FullPrecision]:
    """By row of the slow tier: those of a row are as large."""
    sizes, found = slow.segments.nbytes, {}
    for first in range(0, len(sizes), num_experts):
        is_bottom = slow.segments.is_bottom(first)
        if sizes[first]:
            strides = segment_strides(slow.layout, sizes[first], is_bottom=is_bottom)
            found[first // num_experts] = FullPrecision(arena, starts, strides)
    return found


def alone(layout: ExpertLayout, content: torch.Tensor) -> FullPrecision:
    """One expert by itself, `content` uint8: its number is 0."""
    return FullPrecision(
        content.view(layout.dtype), torch.zeros(1, dtype=torch.int64, device=content.device), Strides.whole(layout)
    )


def _in_weights(starts: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Bytes from the beginning of the arena as weights."""
    return torch.tensor([start // dtype.itemsize for start in starts], dtype=torch.int64, device=device)


def segment_strides(layout: NeuronLayout, nbytes: int, *, is_bottom: bool) -> Strides:
    """Strides of a segment of so many bytes: each neuron has its row of gate, its row of up, its column of down."""
    own, hidden = layout.segment(nbytes, is_bottom=is_bottom), layout.hidden
    gate = layout.head if own.has_head else 0
    num_neurons, row = own.last - own.first, 3 * hidden
    return Strides(num_neurons, gate, gate + hidden, gate + 2 * hidden, row, 1, row, is_cut=True)


def packed_matrix(layout: ReplicaLayout, name: str) -> Matrix:
    """Where the projection of that name lies in a replica."""
    packed: Packed = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8))[name]
    offsets = {part.name: part.offset for part in layout.parts}
    words, zeros, scales = (offsets.get(f"{name}.{part}", 0) for part in PARTS)
    return Matrix(
        words // WORD,
        zeros // WORD,
        2 * scales // WORD,
        packed.num_inputs,
        packed.num_outputs,
        len(packed.scales),
        packed.group_size,
        len(packed.qweight) - 1,
        0 if packed.qzeros is None else packed.qzeros.shape[1],
    )
