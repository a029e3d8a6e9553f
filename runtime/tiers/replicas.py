"""Replicas below full precision as the runtime holds them: how one lies in its slot, and reading it from its file."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from artifacts.errors import BadInput, Incompatible
from artifacts.quantisation.packing import PARTS, Packed, packed_shapes
from artifacts.quantisation.replica_file import verify
from artifacts.quantisation.replicas import Replicas, in_memory
from artifacts.shape import Shape
from runtime.kernels.low_bit import project_packed
from runtime.model.checkpoint import Shard, StoredTensor
from runtime.model.layout import Part
from runtime.model.open import MoeModel


@dataclass(frozen=True, slots=True)
class ReplicaLayout:
    """A replica lies in its slot as in its file, so that it is one read; wide types come first.

    `num_inputs`: of each projection. Parts are named `gate_up_proj.qweight` or `gate_up_proj_bias`.
    """

    project: ClassVar[Callable[..., torch.Tensor]] = staticmethod(project_packed)
    dtype: ClassVar[torch.dtype] = torch.int32

    bits: int
    parts: tuple[Part, ...]
    dtypes: tuple[torch.dtype, ...]
    num_inputs: dict[str, int]

    @classmethod
    def of(cls, bits: int, tensors: Sequence[StoredTensor], num_inputs: dict[str, int]) -> "ReplicaLayout":
        """Of the tensors of one width in the order of the file. Raises Incompatible where they make no projections of
        so many inputs: what computes on them looks at no border."""
        first = tensors[0].offset
        parts = [
            Part(tensor.name.partition(".")[2], tensor.shape, tensor.offset - first, tensor.nbytes)
            for tensor in tensors
        ]
        found = cls(bits, tuple(parts), tuple(tensor.dtype for tensor in tensors), num_inputs)
        if any(not found._is_whole(name) for name in num_inputs):
            raise Incompatible(f"{tensors[0].shard.path} holds a replica of another shape: run moectl quantize again")
        return found

    @property
    def stored_nbytes(self) -> int:
        return self.parts[-1].offset + self.parts[-1].nbytes

    @property
    def nbytes(self) -> int:
        """The room that it takes in memory."""
        return in_memory(self.stored_nbytes)

    def views(self, buffer: torch.Tensor) -> dict[str, Packed | torch.Tensor]:
        """Projections and biases by name as views of `buffer`, uint8 [nbytes] or longer, on any device."""
        tensors = {
            part.name: buffer[part.offset : part.offset + part.nbytes].view(dtype).view(part.shape)
            for part, dtype in zip(self.parts, self.dtypes, strict=True)
        }
        biases = {name: tensor for name, tensor in tensors.items() if "." not in name}
        return biases | {name: self._packed(name, tensors) for name in self.num_inputs}

    def num_outputs(self, name: str) -> int:
        """Of a projection or a bias; 0 where there is none."""
        shapes = {part.name: part.shape for part in self.parts}
        return (shapes.get(name) or shapes.get(f"{name}.scales") or (0,))[-1]

    def _is_whole(self, name: str) -> bool:
        parts = {part.name: (dtype, part) for part, dtype in zip(self.parts, self.dtypes, strict=True)}
        own = {field: parts[f"{name}.{field}"] for field in PARTS if f"{name}.{field}" in parts}
        scales, num_inputs = own["scales"][1].shape if "scales" in own else (), self.num_inputs[name]
        if len(scales) != 2 or not scales[0] or num_inputs % scales[0]:
            return False
        found = {field: (dtype, part.shape) for field, (dtype, part) in own.items()}
        is_aligned = not any(part.offset % dtype.itemsize for dtype, part in own.values())
        return is_aligned and found == packed_shapes(scales[1], num_inputs, self.bits, num_inputs // scales[0])

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
        self._offsets = [own[0].offset for own in tensors]
        self._headers = [own[0].shard.header_digest for own in tensors]
        self._seen = [_stamp(path.stat()) for path in files]

    def read(self, layer: int, expert: int, out: torch.Tensor) -> None:
        """Fill `out`, a uint8 CPU tensor [layout.nbytes] or longer.

        Raises BadInput if the file has shrunk or gone, or is another; the same written again is as good.
        """
        key = layer * self.shape.num_experts + expert
        path, target = self._files[key], memoryview(out.numpy())[: self.layout.stored_nbytes]
        try:
            with path.open("rb", buffering=0) as file:
                self._recognise(key, _stamp(os.fstat(file.fileno())))
                file.seek(self._offsets[key])
                while target.nbytes and (count := file.readinto(target)):
                    target = target[count:]
        except OSError as error:
            raise BadInput(f"{path} cannot be read ({error.strerror}): run moectl quantize again") from error
        if target.nbytes:
            raise BadInput(f"{path} is {target.nbytes} bytes short: it changed while in use, run moectl quantize again")

    def _recognise(self, key: int, stamp: tuple[int, ...]) -> None:
        if stamp == self._seen[key]:
            return
        path = self._files[key]
        try:
            shard = Shard(path)
        except BadInput as problem:
            raise BadInput(f"{path} changed while in use and is damaged: run moectl quantize again") from problem
        shard.close()
        if shard.header_digest != self._headers[key]:  # a digest of all tensors is part of it
            raise BadInput(f"{path} was replaced while in use: start the run again")
        self._seen[key] = stamp


def open_replicas(opened: MoeModel, replicas: Replicas | None, widths: Sequence[int]) -> dict[int, ReplicaStore]:
    """The stores of these widths, by bits. Raises BadInput or Incompatible for files that are not what they should."""
    first = opened.layers[0]
    axis = 0 if first.experts.is_transposed else 1
    matrices = {name: shape for name, shape in first.shapes.items() if not name.endswith("_bias")}
    num_inputs = {name: shape[axis] for name, shape in matrices.items()}
    found = {
        bits: ReplicaStore(replicas.files, bits=bits, shape=opened.shape, num_inputs=num_inputs) for bits in widths
    }
    for store in found.values():
        for name, shape in first.shapes.items():
            if store.layout.num_outputs(name) != (shape[1 - axis] if name in matrices else shape[0]):
                raise Incompatible(f"{replicas.files[0]} has a {name} of another model: run moectl quantize again")
    return found


def verify_files(replicas: Replicas) -> None:
    """Raise BadInput, with the first, for a file that is not byte for byte what was written."""
    for path, hash in zip(replicas.files, replicas.hashes, strict=True):
        verify(path, hash)


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    """What changes when a file is replaced or written into."""
    return found.st_ino, found.st_size, found.st_mtime_ns


def _tensors(path: Path, bits: int) -> list[StoredTensor]:
    """The tensors of one width, as they follow each other in the file."""
    shard = Shard(path)
    shard.close()
    own = [tensor for name, tensor in shard.tensors.items() if name.startswith(f"{bits}.")]
    if not own:
        raise BadInput(f"{path} holds no replica of {bits} bits: run moectl quantize --bits {bits}")
    return sorted(own, key=lambda tensor: tensor.offset)
