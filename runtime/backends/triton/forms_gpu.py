"""GPU backends of experts (at full precision, cut in two, packed, in trellis codes, as published),
each with its kernels."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from artifacts.quantisation.packing import PARTS, Packed
from artifacts.shape import FULL_BITS
from runtime.backends.triton.forms_published_gpu import GpuPublished
from runtime.control.plan import NO_SLOT, Place
from runtime.kernels.batched import is_plain
from runtime.kernels.gates import Gate, gate_of
from runtime.kernels.gpu.addressing import WORD, Biases, Matrix, Numbers, Strides, is_readable
from runtime.kernels.gpu.total import Total
from runtime.kernels.load import kernels
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.layout import ExpertLayout, Layout
from runtime.tiers.fast import ResidentExperts
from runtime.tiers.neuron_major import NeuronLayout
from runtime.tiers.replica_layouts import ReplicaLayout, TrellisLayout
from runtime.tiers.slow_split import SegmentTier


class GpuForm(Protocol):
    """Backend that multiplies a few tokens by experts of one form, each found by its number."""

    def number(self, place: Place) -> int: ...

    def multiply(self, x: torch.Tensor, numbers: Numbers, y: torch.Tensor) -> None:
        """Write the rows of y [T * K, H] for x [T, H] whose numbers [T, K], or those of one token,
        are not below zero. y is float32; for experts as published it may have x's type."""


class GpuForms:
    """Backends of all resident experts. `full` is the backend of whole experts as the checkpoint
    has them, None where all are cut."""

    def __init__(self, resident: ResidentExperts, module: nn.Module) -> None:
        slots = resident.slots
        slow = resident.slow
        shadows = resident.shadows
        self._num_experts = resident.num_experts
        self.full = self._packed = None
        if slow.is_split:
            self._by_row = _segment_forms(
                slow, self._num_experts, gate_of(module), slots.arena, slots.starts
            )
            return
        layout = slow.stores[FULL_BITS].layout
        is_transposed = module.is_transposed
        self.full = full_form(
            gate_of(module), layout, slots.arena, slots.starts, is_transposed=is_transposed
        )
        low = {bits: store.layout for bits, store in slow.stores.items() if bits != FULL_BITS}
        self._packed = {
            (bits, False): replica_form(replica, slots.arena, slots.starts, is_by_key=False)
            for bits, replica in low.items()
        }
        for bits, replica in (shadows.layouts if shadows else {}).items():
            self._packed[bits, True] = replica_form(
                replica, shadows.buffer, shadows.starts, is_by_key=True
            )

    @property
    def are_cut(self) -> bool:
        return self.full is None

    @property
    def is_one(self) -> bool:
        """True if `full` is the backend of all experts."""
        return self._packed is not None and not self._packed

    def grouped(self, places: Sequence[Place]) -> dict[GpuForm, Sequence[Place]]:
        """Return the places grouped by the backend of the expert or segment there."""
        if self.is_one:
            return {self.full: places}
        by_form: dict[GpuForm, list[Place]] = {}
        for place in places:
            by_form.setdefault(self.of(place), []).append(place)
        return by_form

    def of(self, place: Place) -> GpuForm:
        """Return the backend of the expert or segment at a place."""
        if self.are_cut:
            return self._by_row[place.key // self._num_experts]
        return (
            self.full
            if place.bits == FULL_BITS
            else self._packed[place.bits, place.slot == NO_SLOT]
        )


class GpuFullPrecision:
    """Backend of experts or segments in slots, at `starts`, counted in weights from the beginning
    of the `arena`."""

    def __init__(
        self, arena: torch.Tensor, starts: torch.Tensor, strides: Strides, gate: Gate
    ) -> None:
        self._arena = arena
        self._starts = starts
        self._own = {"strides": strides, "gate": gate}
        self._of_token = kernels("gpu.experts.gated").GatedKernels(strides, gate)

    @classmethod
    def of(
        cls,
        arena: torch.Tensor,
        starts: Sequence[int],
        dtype: torch.dtype,
        strides: Strides,
        gate: Gate,
    ) -> "GpuFullPrecision":
        """Return the backend for `arena` uint8 and `starts` in bytes."""
        in_weights = torch.tensor([start // dtype.itemsize for start in starts], dtype=torch.int64)
        return cls(arena.view(dtype), in_weights.to(arena.device), strides, gate)

    def number(self, place: Place) -> int:
        return place.slot

    def starts(self, slots: Sequence[int]) -> torch.Tensor:
        """Return the offsets of these slots in the arena, counted in weights."""
        return self._starts[torch.tensor(slots, device=self._starts.device)]

    def multiply(
        self,
        x: torch.Tensor,
        numbers: Numbers,
        y: torch.Tensor,
        *,
        starts: torch.Tensor | None = None,
        total: Total | None = None,
    ) -> None:
        """Do the same as `GpuForm.multiply`. `numbers` index `starts` if given, and slots
        otherwise. With `total` the outputs of one token are then added up."""
        starts = self._starts if starts is None else starts
        self._of_token.multiply(x, numbers, starts, self._arena, y, total=total)

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
        """Multiply many tokens, sorted by expert: see `runtime.kernels.gpu.experts.gated_tiles`."""
        sizes = {"top_k": top_k, "block_tokens": block_tokens}
        kernels("gpu.experts.gated_tiles").multiply(
            x, order, tiles, self._starts, self._arena, y=y, **sizes, **self._own
        )


class GpuPacked:
    """Backend of packed replicas of one width in `buffer`, uint8, at `starts`, counted in bytes: by
    slot, or by key for resident replicas."""

    def __init__(
        self, layout: ReplicaLayout, buffer: torch.Tensor, starts: Sequence[int], *, is_by_key: bool
    ) -> None:
        self._bits = layout.bits
        self._buffer = buffer
        self._is_by_key = is_by_key
        self._starts = torch.tensor([start // WORD for start in starts], device=buffer.device)
        self._gate_up, self._down = (packed_matrix(layout, name) for name in (GATE_UP, DOWN))

    def number(self, place: Place) -> int:
        return place.key if self._is_by_key else place.slot

    def multiply(self, x: torch.Tensor, numbers: Numbers, y: torch.Tensor) -> None:
        matrices = {"bits": self._bits, "gate_up": self._gate_up, "down": self._down}
        kernels("gpu.experts.gated_packed").multiply(
            x, numbers, self._starts, self._buffer, **matrices, y=y
        )


class GpuTrellis:
    """Backend of replicas of one width in trellis codes. `buffer` and `starts` are as in
    `GpuPacked`."""

    def __init__(
        self, layout: TrellisLayout, buffer: torch.Tensor, starts: Sequence[int], *, is_by_key: bool
    ) -> None:
        self._buffer = buffer
        self._is_by_key = is_by_key
        self._starts = torch.tensor([*starts], dtype=torch.int64, device=buffer.device)
        matrices = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8))
        self._gate_up, self._down = (
            kernels("gpu.trellis").matrix_of(matrices[name], offsets_of(layout, name))
            for name in (GATE_UP, DOWN)
        )

    def number(self, place: Place) -> int:
        return place.key if self._is_by_key else place.slot

    def multiply(self, x: torch.Tensor, numbers: Numbers, y: torch.Tensor) -> None:
        matrices = {"gate_up": self._gate_up, "down": self._down}
        kernels("gpu.experts.gated_trellis").multiply(
            x, numbers, self._starts, self._buffer, **matrices, y=y
        )


def offsets_of(layout: ReplicaLayout, name: str) -> dict[str, int]:
    """Return the offset of each part of a projection in a replica, in bytes."""
    return {role: part.offset for role, part in layout.of(name).items()}


def replica_form(
    layout: ReplicaLayout, buffer: torch.Tensor, starts: Sequence[int], *, is_by_key: bool
) -> GpuPacked | GpuTrellis:
    """Return the backend of replicas with this layout."""
    kind = GpuTrellis if layout.codes == "trellis" else GpuPacked
    return kind(layout, buffer, starts, is_by_key=is_by_key)


def has_form(module: nn.Module, layout: Layout, *, has_replicas: bool) -> bool:
    """Return whether there are kernels for whole experts of this module and layout, and for their
    replicas if they have any. Kernels for replicas support only SiLU's gate without bias."""
    gate = gate_of(module)
    if gate is None or has_replicas and not is_plain(module):
        return False
    if layout.codes == "published":
        return gate.has_up and module.is_transposed == gate.take_turns and is_readable(layout)
    return layout.is_plain


def full_form(
    gate: Gate,
    layout: ExpertLayout,
    arena: torch.Tensor,
    starts: Sequence[int],
    *,
    is_transposed: bool = False,
) -> GpuFullPrecision | GpuPublished:
    """Return the backend of whole experts with this gate in `arena`, uint8, at `starts`, in bytes.
    `is_transposed`: at full precision each matrix lies [in, out]."""
    if layout.codes == "published":
        return GpuPublished(
            layout, arena, torch.tensor(starts, dtype=torch.int64, device=arena.device), gate
        )
    strides = Strides.whole(layout, is_transposed=is_transposed, are_paired=gate.take_turns)
    return GpuFullPrecision.of(arena, starts, layout.dtype, strides, gate)


def segment_strides(layout: NeuronLayout, nbytes: int, *, is_bottom: bool) -> Strides:
    """Return the strides of a segment of `nbytes` bytes: each neuron has its row of gate, its row
    of up if there is one, its column of down, and its biases."""
    segment = layout.segment(nbytes, is_bottom=is_bottom)
    hidden = layout.hidden
    row = layout.width
    gate = layout.head if segment.has_head else 0
    up = gate + (layout.num_inner - 1) * hidden
    down = up + hidden
    bias = up + 2 * hidden
    biases = Biases(bias, bias + layout.num_inner - 1, row, 0 if segment.has_head else None)
    return Strides(
        segment.last - segment.first,
        gate,
        up,
        down,
        row,
        1,
        row,
        is_cut=True,
        biases=biases if layout.has_bias else None,
    )


def packed_matrix(layout: ReplicaLayout, name: str) -> Matrix:
    """Return the layout of the projection called `name` in a replica."""
    packed: Packed = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8))[name]
    offsets = offsets_of(layout, name)
    words, zeros, scales = (offsets.get(role, 0) for role in PARTS)
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


def _segment_forms(
    slow: SegmentTier, num_experts: int, gate: Gate, arena: torch.Tensor, starts: Sequence[int]
) -> dict[int, GpuFullPrecision]:
    """Return the backends by row of the slow tier: the segments of a row are equally large."""
    sizes = slow.segments.nbytes
    forms = {}
    dtype = slow.layout.dtype
    for first in range(0, len(sizes), num_experts):
        is_bottom = slow.segments.is_bottom(first)
        if sizes[first]:
            strides = segment_strides(slow.layout, sizes[first], is_bottom=is_bottom)
            forms[first // num_experts] = GpuFullPrecision.of(arena, starts, dtype, strides, gate)
    return forms
