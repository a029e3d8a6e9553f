"""Replicas below full precision as the runtime holds them: how one lies in its slot, and reading it from its file."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from artifacts.errors import BadInput, Incompatible
from artifacts.packing import PARTS, Packed
from artifacts.replicas import Replicas
from artifacts.shape import Shape
from runtime.checkpoint import Shard, StoredTensor
from runtime.model import MoeModel
from runtime.weights import ALIGNMENT, Part


@dataclass(frozen=True, slots=True)
class ReplicaLayout:
    """Every tensor of a replica on a 64-byte border, in the order in which the file has them.

    `num_inputs`: of each projection. Parts are named `gate_up_proj.qweight` or `gate_up_proj_bias`.
    """

    bits: int
    parts: tuple[Part, ...]
    dtypes: tuple[torch.dtype, ...]
    num_inputs: dict[str, int]

    @classmethod
    def of(cls, bits: int, tensors: Sequence[StoredTensor], num_inputs: dict[str, int]) -> "ReplicaLayout":
        parts, offset = [], 0
        for tensor in tensors:
            name = tensor.name.partition(".")[2]
            parts.append(Part(name, tensor.shape, offset, tensor.nbytes))
            offset = -(-(offset + tensor.nbytes) // ALIGNMENT) * ALIGNMENT
        return cls(bits, tuple(parts), tuple(tensor.dtype for tensor in tensors), num_inputs)

    @property
    def nbytes(self) -> int:
        """Bytes of a slot, a multiple of 64."""
        last = self.parts[-1]
        return -(-(last.offset + last.nbytes) // ALIGNMENT) * ALIGNMENT

    def views(self, buffer: torch.Tensor) -> dict[str, Packed | torch.Tensor]:
        """Projections and biases by name as views of `buffer`, uint8 [nbytes] or longer, on any device."""
        tensors = {
            part.name: buffer[part.offset : part.offset + part.nbytes].view(dtype).view(part.shape)
            for part, dtype in zip(self.parts, self.dtypes, strict=True)
        }
        biases = {name: tensor for name, tensor in tensors.items() if "." not in name}
        return biases | {name: self._packed(name, tensors) for name in self.num_inputs}

    def _packed(self, name: str, tensors: dict[str, torch.Tensor]) -> Packed:
        parts = {part: tensors.get(f"{name}.{part}") for part in PARTS}
        num_inputs = self.num_inputs[name]
        return Packed(self.bits, num_inputs // parts["scales"].shape[0], num_inputs, **parts)


class ReplicaStore:
    """The replicas of one precision on disk, one file an expert; reads one at a time and keeps no file open.

    Raises BadInput for a file that is missing or damaged, Incompatible for one of another shape. Thread-safe.
    """

    def __init__(self, files: Sequence[Path], *, bits: int, shape: Shape, num_inputs: dict[str, int]) -> None:
        assert len(files) == shape.num_keys, (len(files), shape)
        self.shape, self._files = shape, files
        tensors = [_tensors(path, bits) for path in files]
        self.layout = ReplicaLayout.of(bits, tensors[0], num_inputs)
        for path, own in zip(files, tensors, strict=True):
            if ReplicaLayout.of(bits, own, num_inputs) != self.layout:
                raise Incompatible(f"{path} holds a replica of another shape: run moectl quantize again")
        self._offsets = [[tensor.offset for tensor in own] for own in tensors]

    def read(self, layer: int, expert: int, out: torch.Tensor) -> None:
        """Fill `out`, a uint8 CPU tensor [layout.nbytes] or longer. Raises BadInput if the file has shrunk or gone."""
        key, target = layer * self.shape.num_experts + expert, memoryview(out.numpy())
        path = self._files[key]
        try:
            with path.open("rb", buffering=0) as file:
                for part, offset in zip(self.layout.parts, self._offsets[key], strict=True):
                    _read_whole(file.fileno(), target[part.offset : part.offset + part.nbytes], offset, path)
        except OSError as error:
            raise BadInput(f"{path} cannot be read ({error.strerror}): run moectl quantize again") from error


def open_replicas(opened: MoeModel, replicas: Replicas | None, widths: Sequence[int]) -> dict[int, ReplicaStore]:
    """The stores of these widths, by bits. Raises BadInput or Incompatible for files that are not what they should."""
    axis = 0 if opened.layers[0].experts.is_transposed else 1
    parts = opened.store.layout.parts
    num_inputs = {part.name: part.shape[axis] for part in parts if not part.name.endswith("_bias")}
    return {
        bits: ReplicaStore(replicas.files, bits=bits, shape=opened.shape, num_inputs=num_inputs) for bits in widths
    }


def _tensors(path: Path, bits: int) -> list[StoredTensor]:
    """The tensors of one width, as they follow each other in the file."""
    shard = Shard(path)
    shard.close()
    own = [tensor for name, tensor in shard.tensors.items() if name.startswith(f"{bits}.")]
    if not own:
        raise BadInput(f"{path} holds no replica of {bits} bits: run moectl quantize --bits {bits}")
    return sorted(own, key=lambda tensor: tensor.offset)


def _read_whole(descriptor: int, target: memoryview, offset: int, path: Path) -> None:
    while target.nbytes:
        count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise BadInput(f"{path} ends before byte {offset}: it changed while in use, run moectl quantize again")
        target, offset = target[count:], offset + count
