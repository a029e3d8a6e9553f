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
from runtime.model.quantised.quantised_matrix import PLAIN

Views = dict[str, Packed | Trellis | torch.Tensor]


@dataclass(frozen=True, slots=True)
class ReplicaLayout:
    """Layout of a replica in its slot: as in its file, wide types first, so that one read fetches
    it.

    `num_inputs` has the input size of each projection. Roles of parts are as `qweight`.
    """

    is_plain: ClassVar[bool] = False
    codes: ClassVar[str] = "packed"
    format: ClassVar[str] = "replicas"
    project: ClassVar[Callable[..., torch.Tensor]] = staticmethod(project_replica)
    dtype: ClassVar[torch.dtype] = torch.int32

    bits: Width
    parts: tuple[Part, ...]
    num_inputs: dict[str, int]

    @property
    def stored_nbytes(self) -> int:
        """Bytes of a replica in its file."""
        return self.parts[-1].stop

    @property
    def nbytes(self) -> int:
        """Bytes of a replica in memory."""
        return in_memory(self.stored_nbytes)

    def views(self, buffer: torch.Tensor) -> Views:
        """Return projections and biases by name as views of `buffer`, uint8 [nbytes] or longer, on
        any device."""
        biases = {part.name: part.view(buffer) for part in self.parts if not part.role}
        return biases | {name: self._matrix(name, buffer) for name in self.num_inputs}

    def of(self, name: str) -> dict[str, Part]:
        """Return the parts of a projection, or of a bias, by role."""
        return {part.role: part for part in self.parts if part.name == name}

    def num_outputs(self, name: str) -> int:
        """Return the output size of a projection or a bias; 0 where there is none of that name."""
        parts = self.of(name)
        found = parts.get(PLAIN) or parts.get("scales")
        return found.shape[-1] if found and found.shape else 0

    def is_whole(self, name: str) -> bool:
        """Return whether a projection has all its parts, of the right types and shapes, each
        aligned to its type."""
        parts = {role: part for role, part in self.of(name).items() if role in PARTS}
        scales = parts["scales"].shape if "scales" in parts else ()
        num_inputs = self.num_inputs[name]
        if len(scales) != 2 or not scales[0] or num_inputs % scales[0]:
            return False
        return _are_placed(
            parts, packed_shapes(scales[1], num_inputs, self.bits, num_inputs // scales[0])
        )

    def _matrix(self, name: str, buffer: torch.Tensor) -> Packed:
        parts = self._tensors(name, PARTS, buffer)
        num_inputs = self.num_inputs[name]
        return Packed(self.bits, num_inputs // parts["scales"].shape[0], num_inputs, **parts)

    def _tensors(
        self, name: str, roles: Sequence[str], buffer: torch.Tensor
    ) -> dict[str, torch.Tensor | None]:
        parts = self.of(name)
        return {role: parts[role].view(buffer) if role in parts else None for role in roles}


@dataclass(frozen=True, slots=True)
class Rate:
    """Parameters of a matrix in trellis codes that its tensors do not contain."""

    half_bits: int
    state_bits: int
    num_outputs: int


@dataclass(frozen=True, slots=True)
class TrellisLayout(ReplicaLayout):
    """Layout of a replica in trellis codes; `rates` has the rate of each projection."""

    codes: ClassVar[str] = "trellis"
    format: ClassVar[str] = "trellis"
    dtype: ClassVar[torch.dtype] = torch.int16

    rates: dict[str, Rate]

    def num_outputs(self, name: str) -> int:
        if name in self.rates:
            return self.rates[name].num_outputs
        return ReplicaLayout.num_outputs(self, name)

    def is_whole(self, name: str) -> bool:
        parts = {role: part for role, part in self.of(name).items() if role}
        rate = self.rates.get(name)
        num_inputs = self.num_inputs[name]
        if rate is None or "codes" not in parts:
            return False
        low, high = (num_words(rate.half_bits + more, rate.num_outputs) for more in (0, 1))
        num_high, rest = divmod(parts["codes"].shape[0] - low * num_inputs, high - low)
        if rest or not 0 <= num_high <= (num_inputs if rate.half_bits < HALF_BITS[-1] else 0):
            return False
        is_rotated = "row_scales" not in parts
        expected = trellis_shapes(
            rate.num_outputs, num_inputs, rate.half_bits, num_high, is_rotated=is_rotated
        )
        return _are_placed(parts, expected)

    def _matrix(self, name: str, buffer: torch.Tensor) -> Trellis:
        rate = self.rates[name]
        return Trellis(
            rate.half_bits,
            rate.state_bits,
            rate.num_outputs,
            **self._tensors(name, trellis.PARTS, buffer),
            num_inputs=self.num_inputs[name],
        )


def replica_part(name: str, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Part:
    """Return a part by its name in replica files, as `gate_up_proj.qweight` or
    `gate_up_proj_bias`."""
    projection, _, role = name.partition(".")
    return Part(projection, dtype, shape, offset, role)


def _are_placed(
    parts: dict[str, Part], expected: dict[str, tuple[torch.dtype, tuple[int, ...]]]
) -> bool:
    """Return whether parts have these types and shapes, by role, and each is aligned to its
    type."""
    is_aligned = not any(part.offset % part.dtype.itemsize for part in parts.values())
    return is_aligned and expected == {
        role: (part.dtype, part.shape) for role, part in parts.items()
    }


def layout_of(
    bits: Width, tensors: Sequence[StoredTensor], num_inputs: dict[str, int]
) -> ReplicaLayout:
    """Return the layout of the tensors of one width, in the order of the file.

    Raises Incompatible where they are not projections with the sizes of `num_inputs`: kernels check
    no bounds.
    """
    first = tensors[0].offset
    parts = tuple(
        replica_part(
            tensor.name.partition(".")[2], tensor.dtype, tensor.shape, tensor.offset - first
        )
        for tensor in tensors
    )
    if any(part.role == "codes" for part in parts):
        rates = _rates(bits, tensors[0].shard.metadata, num_inputs)
        layout: ReplicaLayout = TrellisLayout(bits, parts, num_inputs, rates)
    else:
        layout = ReplicaLayout(bits, parts, num_inputs)
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
