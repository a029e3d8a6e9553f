"""Layouts of replicas below full precision in their slots: packed codes, or trellis codes."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from artifacts.errors import Incompatible
from artifacts.quantisation.packing import PARTS, Packed, packed_shapes
from artifacts.quantisation.replicas import in_memory
from artifacts.quantisation.trellis import trellis
from artifacts.quantisation.trellis.trellis import (
    HALF_BITS,
    READABLE_STATE_BITS,
    Trellis,
    num_words,
    trellis_shapes,
)
from artifacts.quantisation.widths import Width
from runtime.kernels.replica_linear import project_replica
from runtime.model.files.checkpoint import StoredTensor
from runtime.model.layout import Part

Views = dict[str, Packed | Trellis | torch.Tensor]


@dataclass(frozen=True, slots=True)
class ReplicaLayout:
    """Layout of a replica in its slot: as in its file, wide types first, so that one read fetches
    it.

    `num_inputs` has the input size of each projection. Parts are named `gate_up_proj.qweight` or
    `gate_up_proj_bias`.
    """

    is_plain: ClassVar[bool] = False
    codes: ClassVar[str] = "packed"
    format: ClassVar[str] = "replicas"
    project: ClassVar[Callable[..., torch.Tensor]] = staticmethod(project_replica)
    dtype: ClassVar[torch.dtype] = torch.int32

    bits: Width
    parts: tuple[Part, ...]
    dtypes: tuple[torch.dtype, ...]
    num_inputs: dict[str, int]

    @property
    def stored_nbytes(self) -> int:
        """Bytes of a replica in its file."""
        return self.parts[-1].offset + self.parts[-1].nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of a replica in memory."""
        return in_memory(self.stored_nbytes)

    def views(self, buffer: torch.Tensor) -> Views:
        """Return projections and biases by name as views of `buffer`, uint8 [nbytes] or longer, on
        any device."""
        tensors = {
            part.name: buffer[part.offset : part.offset + part.nbytes].view(dtype).view(part.shape)
            for part, dtype in zip(self.parts, self.dtypes, strict=True)
        }
        biases = {name: tensor for name, tensor in tensors.items() if "." not in name}
        return biases | {name: self._matrix(name, tensors) for name in self.num_inputs}

    def num_outputs(self, name: str) -> int:
        """Return the output size of a projection or a bias; 0 where there is none of that name."""
        shapes = {part.name: part.shape for part in self.parts}
        return (shapes.get(name) or shapes.get(f"{name}.scales") or (0,))[-1]

    def is_whole(self, name: str) -> bool:
        """Return whether a projection has all its parts, of the right types and shapes, each
        aligned to its type."""
        parts = {
            part.name: (dtype, part) for part, dtype in zip(self.parts, self.dtypes, strict=True)
        }
        fields = {field: parts[f"{name}.{field}"] for field in PARTS if f"{name}.{field}" in parts}
        scales = fields["scales"][1].shape if "scales" in fields else ()
        num_inputs = self.num_inputs[name]
        if len(scales) != 2 or not scales[0] or num_inputs % scales[0]:
            return False
        shapes = {field: (dtype, part.shape) for field, (dtype, part) in fields.items()}
        is_aligned = not any(part.offset % dtype.itemsize for dtype, part in fields.values())
        return is_aligned and shapes == packed_shapes(
            scales[1], num_inputs, self.bits, num_inputs // scales[0]
        )

    def _matrix(self, name: str, tensors: dict[str, torch.Tensor]) -> Packed:
        parts = {part: tensors.get(f"{name}.{part}") for part in PARTS}
        num_inputs = self.num_inputs[name]
        return Packed(self.bits, num_inputs // parts["scales"].shape[0], num_inputs, **parts)


@dataclass(frozen=True, slots=True)
class Rate:
    """Parameters of a matrix in trellis codes that its tensors do not contain."""

    half_bits: int
    state_bits: int
    num_outputs: int


@dataclass(frozen=True, slots=True)
class TrellisLayout(ReplicaLayout):
    """Layout of a replica in trellis codes; `rates` has the rate of each projection. Parts are
    named `gate_up_proj.codes`."""

    codes: ClassVar[str] = "trellis"
    format: ClassVar[str] = "trellis"
    dtype: ClassVar[torch.dtype] = torch.int16

    rates: dict[str, Rate]

    def num_outputs(self, name: str) -> int:
        if name in self.rates:
            return self.rates[name].num_outputs
        return next((part.shape[-1] for part in self.parts if part.name == name), 0)

    def is_whole(self, name: str) -> bool:
        fields = {
            part.name.partition(".")[2]: (dtype, part)
            for part, dtype in zip(self.parts, self.dtypes, strict=True)
            if part.name.startswith(f"{name}.")
        }
        rate = self.rates.get(name)
        num_inputs = self.num_inputs[name]
        if rate is None or "codes" not in fields:
            return False
        low, high = (num_words(rate.half_bits + more, rate.num_outputs) for more in (0, 1))
        num_high, rest = divmod(fields["codes"][1].shape[0] - low * num_inputs, high - low)
        if rest or not 0 <= num_high <= (num_inputs if rate.half_bits < HALF_BITS[-1] else 0):
            return False
        is_rotated = "row_scales" not in fields
        shapes = {field: (dtype, part.shape) for field, (dtype, part) in fields.items()}
        expected = trellis_shapes(
            rate.num_outputs, num_inputs, rate.half_bits, num_high, is_rotated=is_rotated
        )
        is_aligned = not any(part.offset % dtype.itemsize for dtype, part in fields.values())
        return is_aligned and shapes == expected

    def _matrix(self, name: str, tensors: dict[str, torch.Tensor]) -> Trellis:
        rate = self.rates[name]
        parts = {part: tensors.get(f"{name}.{part}") for part in trellis.PARTS}
        return Trellis(
            rate.half_bits,
            rate.state_bits,
            rate.num_outputs,
            **parts,
            num_inputs=self.num_inputs[name],
        )


def layout_of(
    bits: Width, tensors: Sequence[StoredTensor], num_inputs: dict[str, int]
) -> ReplicaLayout:
    """Return the layout of the tensors of one width, in the order of the file.

    Raises Incompatible where they are not projections with the sizes of `num_inputs`: kernels check
    no bounds.
    """
    first = tensors[0].offset
    dtypes = tuple(tensor.dtype for tensor in tensors)
    parts = tuple(
        Part(tensor.name.partition(".")[2], tensor.shape, tensor.offset - first, tensor.nbytes)
        for tensor in tensors
    )
    if any(part.name.endswith(".codes") for part in parts):
        rates = _rates(bits, tensors[0].shard.metadata, num_inputs)
        layout: ReplicaLayout = TrellisLayout(bits, parts, dtypes, num_inputs, rates)
    else:
        layout = ReplicaLayout(bits, parts, dtypes, num_inputs)
    if any(not layout.is_whole(name) for name in num_inputs):
        raise Incompatible(
            f"{tensors[0].shard.path} holds a replica of another shape: run moectl quantize again"
        )
    return layout


def _rates(bits: Width, metadata: dict[str, str], num_inputs: dict[str, int]) -> dict[str, Rate]:
    """Return the rates by projection, without projections that the metadata do not describe."""
    rates = {}
    for name in num_inputs:
        texts = [
            metadata.get(key, "")
            for key in (f"{bits}.{name}.half_bits", "state_bits", f"{name}.outputs")
        ]
        if all(re.fullmatch("[1-9][0-9]{0,8}", text) for text in texts):
            rate = Rate(*map(int, texts))
            if rate.half_bits in HALF_BITS and rate.state_bits in READABLE_STATE_BITS:
                rates[name] = rate
    return rates
