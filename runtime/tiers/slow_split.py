"""The slow tier of split experts: neuron-major, read a segment at a time."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from artifacts.shape import FULL_BITS
from runtime.control.plan import Place
from runtime.control.segments import Segments
from runtime.model.files.expert_store import DiskStore
from runtime.model.layout import ExpertStore, aligned, fill
from runtime.model.open import MoeModel
from runtime.tiers.neuron_major import NeuronLayout, Views, project_segment
from runtime.tiers.ram import RamStore
from runtime.tiers.slow import SlowTier, unreadable


class NeuronMajorStore(ExpertStore):
    """Reads experts from `disk`, one at a time, and rearranges each neuron by neuron. Thread-safe;
    each thread keeps a buffer of one expert."""

    def __init__(self, disk: DiskStore, layout: NeuronLayout) -> None:
        self.layout = layout
        self.shape = disk.shape
        self._disk = disk
        self._own = threading.local()

    def read(self, layer: int, expert: int, out: torch.Tensor) -> None:
        """Fill `out`, a uint8 CPU tensor [layout.nbytes] or longer, with one expert."""
        stored = self._stored()
        self._disk.read(layer, expert, stored)
        self.layout.pack(self._disk.layout.views(stored), out[: self.layout.nbytes])

    def check_unchanged(self) -> None:
        """Raise BadInput if the checkpoint was written into since it was opened."""
        self._disk.check_unchanged()

    def read_segment(self, layer: int, expert: int, out: torch.Tensor, *, is_bottom: bool) -> None:
        """Fill `out`, as long as the segment, with a top or a bottom. Reads only the spans that
        hold the segment."""
        stored = self._stored()
        segment = self.layout.segment(len(out), is_bottom=is_bottom)
        self._disk.read(layer, expert, stored, spans=self.layout.spans(self._disk.layout, segment))
        self.layout.pack(self._disk.layout.views(stored), out, segment)

    def _stored(self) -> torch.Tensor:
        """This thread's buffer for an expert as it is stored, uint8."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = aligned(self._disk.layout.nbytes)
        return self._own.buffer


@dataclass(frozen=True, slots=True)
class SegmentTier(SlowTier):
    """The slow tier of split experts. Bottom segments count as further layers: row L + l holds
    those of layer l.

    From RAM a segment is one copy. From disk its rows of gate and up are read and rearranged, and
    all of down, where a neuron is a column; for experts that are stored transposed it is the other
    way round.

    `views_in_ram` has every segment by key where experts are in RAM, and is empty where they are on
    disk.
    """

    segments: Segments
    views_in_ram: list[torch.Tensor]
    is_split: ClassVar[bool] = True

    @classmethod
    def of(
        cls, opened: MoeModel, segments: Segments, *, in_ram: bool, pin: bool = False
    ) -> "SegmentTier":
        """Return the slow tier of a model, read into RAM (page-locked if `pin`) or left on disk."""
        layout = NeuronLayout.of(
            opened.layers[0], opened.store.layout.dtype, opened.shape.expert_nbytes
        )
        store = NeuronMajorStore(opened.store, layout)
        if not in_ram:
            return cls({FULL_BITS: store}, segments, [])
        tier = cls({FULL_BITS: RamStore(store, pin=pin)}, segments, [])
        tier.cut()
        return tier

    def cut(self) -> None:
        """Make new views of all segments in RAM, after `segments` has changed."""
        store = self.stores[FULL_BITS]
        if store.buffer is not None:
            keys = range(store.shape.num_keys)
            num_experts = store.shape.num_experts
            whole = [store.view(*divmod(key, num_experts)) for key in keys]
            sizes = self.segments.nbytes[: len(whole)]
            tops = [expert[:size] for expert, size in zip(whole, sizes, strict=True)]
            self.views_in_ram[:] = tops + [
                expert[size:] for expert, size in zip(whole, sizes, strict=True)
            ]

    @property
    def layout(self) -> NeuronLayout:
        return self.stores[FULL_BITS].layout

    def read(self, layer: int, expert: int, out: torch.Tensor, *, bits: int = FULL_BITS) -> None:
        """Copy one segment to the start of `out`. Raises BadInput where it cannot be read."""
        if self.views_in_ram:
            fill(out, self.view(layer, expert))
            return
        row = layer % self.stores[FULL_BITS].shape.num_layers
        store = self.stores[FULL_BITS]
        nbytes = self.segments.nbytes[layer * store.shape.num_experts + expert]
        try:
            store.read_segment(row, expert, out[:nbytes], is_bottom=row != layer)
        except OSError as error:
            raise unreadable(row, expert, error) from error

    def view(self, layer: int, expert: int, *, bits: int = FULL_BITS) -> torch.Tensor | None:
        """Return the segment's bytes where they lie in RAM; None where it is on disk."""
        if not self.views_in_ram:
            return None
        return self.views_in_ram[layer * self.stores[FULL_BITS].shape.num_experts + expert]

    def num_bytes(self, place: Place) -> int:
        """Return the bytes of the segment that a place names."""
        return self.segments.nbytes[place.key]

    def weights(self, place: Place, buffer: torch.Tensor) -> Views:
        """Return views of the segment at the start of `buffer`."""
        return self.layout.views(
            buffer[: self.num_bytes(place)], has_head=not self.segments.is_bottom(place.key)
        )

    def together(self, opened: MoeModel) -> None:
        """Return None: torch computes segments one by one."""

    def projection(self, bits: int) -> Callable[..., torch.Tensor]:
        """Return the function that multiplies by a segment."""
        return project_segment
