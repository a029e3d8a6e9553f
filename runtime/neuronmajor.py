"""Experts laid out neuron by neuron, so that a segment is one contiguous copy; and the arithmetic of segments.

An expert is a sum over its neurons: the outputs of its segments add up to its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from artifacts.errors import Incompatible
from artifacts.replicas import FULL_BITS
from artifacts.shape import Shape
from runtime.layers import MoeLayer
from runtime.model import MoeModel
from runtime.plan import Place
from runtime.segments import Segments
from runtime.slowtier import SlowTier
from runtime.weights import DiskStore, RamStore, aligned

Views = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class NeuronLayout:
    """One expert of `nbytes`: a head with what belongs to no neuron, the bias of down, then neuron after neuron its rows
    of gate and up, its column of down, its biases.

    Any first n neurons with the head, and the others without, lie in one piece each. As many bytes as in a slot: what
    borders of 64 bytes cost there is left empty in the head.
    """

    hidden: int
    num_neurons: int
    num_inner: int  # 2: gate and up; 1: up alone
    has_bias: bool
    is_concatenated: bool
    is_transposed: bool
    dtype: torch.dtype
    nbytes: int

    @classmethod
    def of(cls, layer: MoeLayer, dtype: torch.dtype, nbytes: int) -> "NeuronLayout":
        """As the module of a layer says. Raises Incompatible for experts that are no sum over their neurons."""
        module = layer.experts
        if getattr(module, "has_post_expert_norm", False):
            raise Incompatible("these experts end in a norm, which is not the sum of its segments': they cannot be split")
        return cls(
            hidden=layer.shapes["down_proj"][1 if module.is_transposed else 0],
            num_neurons=layer.num_neurons,
            num_inner=2 if module.has_gate else 1,
            has_bias=module.has_bias,
            is_concatenated=module.is_concatenated,
            is_transposed=module.is_transposed,
            dtype=dtype,
            nbytes=nbytes,
        )

    @property
    def width(self) -> int:
        """Weights and biases of one neuron."""
        return (self.num_inner + 1) * self.hidden + (self.num_inner if self.has_bias else 0)

    @property
    def head(self) -> int:
        """Elements before the first neuron."""
        return self.nbytes // self.dtype.itemsize - self.num_neurons * self.width

    def pack(self, expert: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        """Write an expert, its parts by name as the module has them, to the start of `out`, uint8 on the CPU."""
        views = self.views(out[: self.nbytes], has_head=True)
        inner = "gate_up_proj" if self.num_inner == 2 else "up_proj"
        weight = expert[inner] if self.is_transposed else expert[inner].T  # [H, num_inner * I]
        views["inner"].copy_(self._by_part(weight))
        views["down"].copy_(expert["down_proj"] if self.is_transposed else expert["down_proj"].T)
        if self.has_bias:
            views["inner_bias"].copy_(self._by_part(expert[f"{inner}_bias"][None]))
            views["down_bias"].copy_(expert["down_proj_bias"])

    def views(self, buffer: torch.Tensor, *, has_head: bool) -> Views:
        """A segment of n neurons that fills `buffer`, uint8: `inner` [num_inner, H, n], `down` [n, H], biases."""
        data, hidden = buffer.view(self.dtype), self.hidden
        rows = data[self.head if has_head else 0 :].view(-1, self.width)
        ends = self.num_inner * hidden, (self.num_inner + 1) * hidden
        inner = rows[:, : ends[0]].unflatten(1, (self.num_inner, hidden)).permute(1, 2, 0)
        views = {"inner": inner, "down": rows[:, ends[0] : ends[1]]}
        if self.has_bias:
            views["inner_bias"] = rows[:, ends[1] :].T.unsqueeze(1)  # [num_inner, 1, n]
        return views | ({"down_bias": data[:hidden]} if self.has_bias and has_head else {})

    def _by_part(self, columns: torch.Tensor) -> torch.Tensor:
        """[m, num_inner * I], gate and up side by side or in turn -> [num_inner, m, I]."""
        if self.is_concatenated:
            return columns.unflatten(1, (self.num_inner, -1)).permute(1, 0, 2)
        return columns.unflatten(1, (-1, self.num_inner)).permute(2, 0, 1)


def project_segment(module: nn.Module, weights: Views, name: str, x: torch.Tensor) -> torch.Tensor:
    """One projection of one segment, x [t, in] -> [t, out], gate and up arranged as the module's own gate wants them."""
    if name == "down_proj":
        y = x @ weights["down"]
        return y + weights["down_bias"] if "down_bias" in weights else y
    inner = weights["inner"]
    y = torch.bmm(x.expand(len(inner), *x.shape), inner)  # [num_inner, t, n]
    if "inner_bias" in weights:
        y = y + weights["inner_bias"]
    return (y.transpose(0, 1) if module.is_concatenated else y.permute(1, 2, 0)).reshape(len(x), -1)


class NeuronMajorStore:
    """Reads experts from `disk`, one at a time, and turns each round. Thread-safe; keeps nothing."""

    def __init__(self, disk: DiskStore, layout: NeuronLayout) -> None:
        self.layout, self.shape, self._disk = layout, disk.shape, disk

    def read(self, layer: int, expert: int, out: torch.Tensor) -> None:
        """Fill `out`, a uint8 CPU tensor [layout.nbytes] or longer, with one expert."""
        stored = aligned(self._disk.layout.nbytes)
        self._disk.read(layer, expert, stored)
        self.layout.pack(self._disk.layout.views(stored), out)


@dataclass(frozen=True, slots=True)
class SegmentTier(SlowTier):
    """The slow tier of split experts. Bottoms count as further layers: row L + l holds those of layer l.

    In RAM a segment is one copy. From disk the whole expert is read for each of its segments, and turned round: an
    expert of which both are missing is read twice.
    """

    segments: Segments

    @classmethod
    def of(cls, opened: MoeModel, segments: Segments, *, in_ram: bool, pin: bool = False) -> "SegmentTier":
        layout = NeuronLayout.of(opened.layers[0], opened.store.layout.dtype, opened.shape.expert_nbytes)
        store = NeuronMajorStore(opened.store, layout)
        return cls({FULL_BITS: RamStore(store, pin=pin) if in_ram else store}, segments)

    def read(self, layer: int, expert: int, out: torch.Tensor, *, bits: int = FULL_BITS) -> None:
        lying = self.view(layer, expert)
        if lying is None:
            whole, store = aligned(self.nbytes(FULL_BITS)), self.stores[FULL_BITS]
            store.read(layer % store.shape.num_layers, expert, whole)
            lying = whole[self._span(layer)]
        out[: len(lying)].copy_(lying)

    def view(self, layer: int, expert: int, *, bits: int = FULL_BITS) -> torch.Tensor | None:
        store = self.stores[FULL_BITS]
        if not isinstance(store, RamStore):
            return None
        return store.view(layer % store.shape.num_layers, expert)[self._span(layer)]

    def num_bytes(self, place: Place) -> int:
        return self.segments.nbytes[place.key]

    def weights(self, place: Place, buffer: torch.Tensor) -> Views:
        layout = self.stores[FULL_BITS].layout
        return layout.views(buffer[: self.num_bytes(place)], has_head=not self.segments.is_bottom(place.key))

    def projecting(self, bits: int) -> object:
        return project_segment

    def _span(self, row: int) -> slice:
        shape: Shape = self.stores[FULL_BITS].shape
        top = self.segments.nbytes[row % shape.num_layers * shape.num_experts]
        return slice(top, shape.expert_nbytes) if row >= shape.num_layers else slice(0, top)
