"""Experts laid out neuron by neuron, so that a segment is one contiguous copy, and the arithmetic
of segments.

An expert is a sum over its neurons: the outputs of its segments add up to its own output.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from artifacts.errors import Incompatible
from runtime.model.layers import MoeLayer
from runtime.model.layout import ExpertLayout, Part, Spans

Views = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Segment:
    """Neurons `first` to `last` of an expert; with the head, also the parameters that belong to no
    neuron."""

    first: int
    last: int
    has_head: bool


@dataclass(frozen=True, slots=True)
class NeuronLayout:
    """Layout of an expert of `nbytes`, neuron by neuron.

    A head comes first, with the bias of down, which belongs to no neuron. Each neuron follows with
    its rows of gate and up, its column of down and its biases. Therefore the head with the first n
    neurons is one piece, and the other neurons are another. An expert takes as many bytes as in a
    slot; bytes that pad 64-byte borders there lie unused in the head.
    """

    codes: ClassVar[str] = "neurons"

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
        """Return the layout for a layer's experts. Raises Incompatible where they are not sums over
        their neurons."""
        module = layer.experts
        if getattr(module, "has_post_expert_norm", False):
            raise Incompatible(
                "experts that end in a norm are no sum of their segments: they cannot be split"
            )
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
        """The number of weights and biases of one neuron."""
        return (self.num_inner + 1) * self.hidden + (self.num_inner if self.has_bias else 0)

    @property
    def head(self) -> int:
        """The number of elements before the first neuron."""
        return self.nbytes // self.dtype.itemsize - self.num_neurons * self.width

    def segment(self, nbytes: int, *, is_bottom: bool) -> "Segment":
        """Return the neurons of a top segment, or of a bottom one, of `nbytes`."""
        size = self.width * self.dtype.itemsize
        if is_bottom:
            return Segment(self.num_neurons - nbytes // size, self.num_neurons, has_head=False)
        return Segment(0, (nbytes - self.head * self.dtype.itemsize) // size, has_head=True)

    def pack(
        self,
        expert: Mapping[str, torch.Tensor],
        out: torch.Tensor,
        segment: "Segment | None" = None,
    ) -> None:
        """Write an expert, or a segment of it, to `out`, uint8 on the CPU and of that size.
        `expert` has the module's parameters by name."""
        written = segment or Segment(0, self.num_neurons, has_head=True)
        views = self.views(out, has_head=written.has_head)
        neurons = slice(written.first, written.last)
        # [H, num_inner * I]
        weight = expert[self._inner_name] if self.is_transposed else expert[self._inner_name].T
        views["inner"].copy_(self._by_part(weight)[..., neurons])
        views["down"].copy_(
            (expert["down_proj"] if self.is_transposed else expert["down_proj"].T)[neurons]
        )
        if self.has_bias:
            views["inner_bias"].copy_(
                self._by_part(expert[f"{self._inner_name}_bias"][None])[..., neurons]
            )
        if self.has_bias and written.has_head:
            views["down_bias"].copy_(expert["down_proj_bias"])

    def spans(self, stored: ExpertLayout, segment: "Segment") -> Spans:
        """Return the spans of a stored expert that make up a segment: rows of its neurons where a
        neuron is a row, all of a part where a neuron is a column."""
        return tuple(span for part in stored.parts for span in self._spans(part, segment))

    def _spans(self, part: Part, segment: "Segment") -> Spans:
        begin = part.offset
        if part.name.endswith("_bias"):
            is_taken = segment.has_head or part.name != "down_proj_bias"
            return ((begin, begin + part.nbytes),) if is_taken else ()
        is_down = part.name == "down_proj"
        if is_down != self.is_transposed:
            return ((begin, begin + part.nbytes),)
        row = part.nbytes // part.shape[0]
        if is_down or not self.is_concatenated:  # gate and up of a neuron in turn
            rows = part.shape[0] // self.num_neurons
            return ((begin + segment.first * rows * row, begin + segment.last * rows * row),)
        blocks = (begin + block * self.num_neurons * row for block in range(self.num_inner))
        return tuple((block + segment.first * row, block + segment.last * row) for block in blocks)

    @property
    def _inner_name(self) -> str:
        return "gate_up_proj" if self.num_inner == 2 else "up_proj"

    def views(self, buffer: torch.Tensor, *, has_head: bool) -> Views:
        """Return views of the segment that fills `buffer`, uint8, as `project_segment` takes them:
        views of its neurons, and of the head if it has one."""
        data = buffer.view(self.dtype)
        rows = data[self.head if has_head else 0 :].view(-1, self.width)
        views = {"down": self._down(rows), **self._inner(rows)}
        return views | ({"down_bias": data[: self.hidden]} if self.has_bias and has_head else {})

    def _down(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the columns of down in `rows` [n, width]: [n, H]."""
        return rows[:, self.num_inner * self.hidden : (self.num_inner + 1) * self.hidden]

    def _inner(self, rows: torch.Tensor) -> Views:
        """Return gate and up in `rows` [n, width]: [num_inner, H, n], biases [num_inner, 1, n]."""
        end = self.num_inner * self.hidden
        inner = {
            "inner": rows[:, :end].unflatten(1, (self.num_inner, self.hidden)).permute(1, 2, 0)
        }
        return inner | (
            {"inner_bias": rows[:, end + self.hidden :].T.unsqueeze(1)} if self.has_bias else {}
        )

    def _by_part(self, columns: torch.Tensor) -> torch.Tensor:
        """Separate gate and up, side by side or in turn: [m, num_inner * I] -> [num_inner, m,
        I]."""
        if self.is_concatenated:
            return columns.unflatten(1, (self.num_inner, -1)).permute(1, 0, 2)
        return columns.unflatten(1, (-1, self.num_inner)).permute(2, 0, 1)


def project_segment(module: nn.Module, weights: Views, name: str, x: torch.Tensor) -> torch.Tensor:
    """Compute one projection of one segment, x [t, in] -> [t, out], with gate and up in the order
    of the module's own gate."""
    if name == "down_proj":
        y = x @ weights["down"]
        return y + weights["down_bias"] if "down_bias" in weights else y
    y = x @ weights["inner"]  # [num_inner, t, n]
    if "inner_bias" in weights:
        y = y + weights["inner_bias"]
    return (y.transpose(0, 1) if module.is_concatenated else y.permute(1, 2, 0)).reshape(len(x), -1)
