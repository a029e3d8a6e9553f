"""Replicas below full precision: how one lies in its slot, and how it is read from its file."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from artifacts.errors import BadInput, Incompatible, shortage
from artifacts.quantisation.packing import PARTS, Packed, packed_shapes
from artifacts.quantisation.replica_file import check_identity, verify
from artifacts.quantisation.replicas import Replicas, in_memory
from artifacts.shape import Shape
from runtime.kernels.low_bit import project_packed
from runtime.model.checkpoint import Shard, StoredTensor
from runtime.model.layout import Part
from runtime.model.open import MoeModel


@dataclass(frozen=True, slots=True)
class ReplicaLayout:
    """How a replica lies in its slot: as in its file, wide types first, so that one read fetches it.

    `num_inputs` has the input size of each projection. Parts are named `gate_up_proj.qweight` or `gate_up_proj_bias`.
    """

    is_plain: ClassVar[bool] = False
    format: ClassVar[str] = "replicas"
    project: ClassVar[Callable[..., torch.Tensor]] = staticmethod(project_packed)
    dtype: ClassVar[torch.dtype] = torch.int32

    bits: int
    parts: tuple[Part, ...]
    dtypes: tuple[torch.dtype, ...]
    num_inputs: dict[str, int]

    @classmethod
    def of(cls, bits: int, tensors: Sequence[StoredTensor], num_inputs: dict[str, int]) -> "ReplicaLayout":
        """The layout of the tensors of one width, in the order of the file.

        Raises Incompatible where they are not projections of so many inputs: kernels check no bounds.
        """
        first = tensors[0].offset
        parts = [
            Part(tensor.name.partition(".")[2], tensor.shape, tensor.offset - first, tensor.nbytes)
            for tensor in tensors
        ]
        layout = cls(bits, tuple(parts), tuple(tensor.dtype for tensor in tensors), num_inputs)
        if any(not layout._is_whole(name) for name in num_inputs):
            raise Incompatible(f"{tensors[0].shard.path} holds a replica of another shape: run moectl quantize again")
        return layout

    @property
    def stored_nbytes(self) -> int:
        """Bytes of a replica in its file."""
        return self.parts[-1].offset + self.parts[-1].nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of a replica in memory."""
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
        """The output size of a projection or a bias; 0 where there is none of that name."""
        shapes = {part.name: part.shape for part in self.parts}
        return (shapes.get(name) or shapes.get(f"{name}.scales") or (0,))[-1]

    def _is_whole(self, name: str) -> bool:
        """Whether a projection has all its parts, of the right types and shapes, each aligned to its type."""
        parts = {part.name: (dtype, part) for part, dtype in zip(self.parts, self.dtypes, strict=True)}
        fields = {field: parts[f"{name}.{field}"] for field in PARTS if f"{name}.{field}" in parts}
        scales, num_inputs = fields["scales"][1].shape if "scales" in fields else (), self.num_inputs[name]
        if len(scales) != 2 or not scales[0] or num_inputs % scales[0]:
            return False
        shapes = {field: (dtype, part.shape) for field, (dtype, part) in fields.items()}
        is_aligned = not any(part.offset % dtype.itemsize for dtype, part in fields.values())
        return is_aligned and shapes == packed_shapes(scales[1], num_inputs, self.bits, num_inputs // scales[0])

    def _packed(self, name: str, tensors: dict[str, torch.Tensor]) -> Packed:
        parts = {part: tensors.get(f"{name}.{part}") for part in PARTS}
        num_inputs = self.num_inputs[name]
        return Packed(self.bits, num_inputs // parts["scales"].shape[0], num_inputs, **parts)


class ReplicaStore:
    """The replicas of one precision on disk, one file an expert. Reads one at a time and keeps no file open.

    `model` is the fingerprint that the files must name. Raises BadInput for a file that is missing, damaged or of
    another model or expert, Incompatible for one of another shape. Thread-safe.
    """

    def __init__(
        self, files: Sequence[Path], *, bits: int, shape: Shape, num_inputs: dict[str, int], model: str
    ) -> None:
        assert len(files) == shape.num_keys, (len(files), shape)
        self.shape, self._files = shape, files
        tensors = [_tensors(path, bits) for path in files]
        self.layout = ReplicaLayout.of(bits, tensors[0], num_inputs)
        for key, (path, of_file) in enumerate(zip(files, tensors, strict=True)):
            check_identity(path, of_file[0].shard.metadata, model=model, key=divmod(key, shape.num_experts))
            if ReplicaLayout.of(bits, of_file, num_inputs) != self.layout:
                raise Incompatible(f"{path} holds a replica of another shape: run moectl quantize again")
        self._offsets = [of_file[0].offset for of_file in tensors]
        self._headers = [of_file[0].shard.header_digest for of_file in tensors]
        self._seen = [_stamp(path.stat()) for path in files]

    def read(self, layer: int, expert: int, out: torch.Tensor) -> None:
        """Fill `out`, a uint8 CPU tensor [layout.nbytes] or longer.

        Raises BadInput if the file has shrunk, is missing or has other content; the same content written again passes.
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
            unreadable = BadInput(f"{path} cannot be read ({error.strerror}): run moectl quantize again")
            raise shortage(error) or unreadable from error
        if target.nbytes:
            raise BadInput(f"{path} is {target.nbytes} bytes short: it changed while in use, run moectl quantize again")

    def check_unchanged(self) -> None:
        """Return always: each read recognises its file."""

    def _recognise(self, key: int, stamp: tuple[int, ...]) -> None:
        """Raise BadInput where a file whose `stamp` is new has other tensors than before."""
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
    """The stores of these widths, by bits. Raises BadInput for damaged files, Incompatible for another model's."""
    first = opened.layers[0]
    axis = 0 if first.experts.is_transposed else 1
    matrices = {name: shape for name, shape in first.shapes.items() if not name.endswith("_bias")}
    num_inputs = {name: shape[axis] for name, shape in matrices.items()}
    stores = {
        bits: ReplicaStore(
            replicas.files, bits=bits, shape=opened.shape, num_inputs=num_inputs, model=opened.fingerprint
        )
        for bits in widths
    }
    for store in stores.values():
        for name, shape in first.shapes.items():
            if store.layout.num_outputs(name) != (shape[1 - axis] if name in matrices else shape[0]):
                raise Incompatible(f"{replicas.files[0]} has a {name} of another model: run moectl quantize again")
    return stores


def verify_files(replicas: Replicas) -> None:
    """Raise BadInput that names the first file whose bytes are not those that were written."""
    for path, hash in zip(replicas.files, replicas.hashes, strict=True):
        verify(path, hash)


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    """Numbers that change when a file is replaced or written into."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def _tensors(path: Path, bits: int) -> list[StoredTensor]:
    """The tensors of one width, in the order of the file."""
    shard = Shard(path)
    shard.close()
    tensors = [tensor for name, tensor in shard.tensors.items() if name.startswith(f"{bits}.")]
    if not tensors:
        raise BadInput(f"{path} holds no replica of {bits} bits: run moectl quantize --bits {bits}")
    return sorted(tensors, key=lambda tensor: tensor.offset)
