"""Replicas below full precision, read from their files."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from artifacts.errors import BadInput, Incompatible, shortage
from artifacts.quantisation.replica_file import check_identity, verify
from artifacts.quantisation.replicas import Replicas
from artifacts.quantisation.widths import Width, as_width, label
from artifacts.shape import Shape
from runtime.model.files.checkpoint import Shard, StoredTensor
from runtime.model.layout import ExpertStore
from runtime.model.open import MoeModel
from runtime.tiers.replica_layouts import layout_of


class ReplicaStore(ExpertStore):
    """The replicas of one precision on disk, one file an expert. Reads one at a time and keeps no
    file open.

    `model` is the fingerprint that the files must name. Raises BadInput for a file that is missing,
    damaged or of another model or expert, Incompatible for one of another shape. Thread-safe.
    """

    def __init__(
        self,
        files: Sequence[Path],
        *,
        bits: Width,
        shape: Shape,
        num_inputs: dict[str, int],
        model: str,
    ) -> None:
        assert len(files) == shape.num_keys, (len(files), shape)
        self.shape = shape
        self._files = files
        tensors = [_tensors(path, bits) for path in files]
        self.layout = layout_of(bits, tensors[0], num_inputs)
        for key, (path, of_file) in enumerate(zip(files, tensors, strict=True)):
            check_identity(
                path, of_file[0].shard.metadata, model=model, key=divmod(key, shape.num_experts)
            )
            if layout_of(bits, of_file, num_inputs) != self.layout:
                raise Incompatible(
                    f"{path} holds a replica of another shape: run moectl quantize again"
                )
        self._offsets = [of_file[0].offset for of_file in tensors]
        self._headers = [of_file[0].shard.header_digest for of_file in tensors]
        self._seen = [_stamp(path.stat()) for path in files]

    def read(self, layer: int, expert: int, out: torch.Tensor) -> None:
        """Fill `out`, a uint8 CPU tensor [layout.nbytes] or longer.

        Raises BadInput if the file has shrunk, is missing or has other content; the same content
        written again passes.
        """
        key = layer * self.shape.num_experts + expert
        path = self._files[key]
        target = memoryview(out.numpy())[: self.layout.stored_nbytes]
        try:
            with path.open("rb", buffering=0) as file:
                self._recognise(key, _stamp(os.fstat(file.fileno())))
                file.seek(self._offsets[key])
                while target.nbytes and (count := file.readinto(target)):
                    target = target[count:]
        except OSError as error:
            unreadable = BadInput(
                f"{path} cannot be read ({error.strerror}): run moectl quantize again"
            )
            raise shortage(error) or unreadable from error
        if target.nbytes:
            raise BadInput(
                f"{path} is {target.nbytes} bytes short: it changed while in use, run moectl "
                "quantize again"
            )

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
            raise BadInput(
                f"{path} changed while in use and is damaged: run moectl quantize again"
            ) from problem
        shard.close()
        if shard.header_digest != self._headers[key]:  # a digest of all tensors is part of it
            raise BadInput(f"{path} was replaced while in use: start the run again")
        self._seen[key] = stamp


def open_replicas(
    opened: MoeModel, replicas: Replicas | None, widths: Sequence[Width]
) -> dict[Width, ReplicaStore]:
    """Return the stores of these widths, by bits. Raises BadInput for damaged files, Incompatible
    for another model's."""
    first = opened.layers[0]
    axis = 0 if first.experts.is_transposed else 1
    matrices = {name: shape for name, shape in first.shapes.items() if not name.endswith("_bias")}
    num_inputs = {name: shape[axis] for name, shape in matrices.items()}
    stores = {
        bits: ReplicaStore(
            replicas.files,
            bits=bits,
            shape=opened.shape,
            num_inputs=num_inputs,
            model=opened.fingerprint,
        )
        for bits in map(as_width, widths)
    }
    for store in stores.values():
        for name, shape in first.shapes.items():
            if store.layout.num_outputs(name) != (
                shape[1 - axis] if name in matrices else shape[0]
            ):
                raise Incompatible(
                    f"{replicas.files[0]} has a {name} of another model: run moectl quantize again"
                )
    return stores


def verify_files(replicas: Replicas) -> None:
    """Raise BadInput that names the first file whose bytes are not the ones that were written."""
    for path, hash in zip(replicas.files, replicas.hashes, strict=True):
        verify(path, hash)


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    """Numbers that change when a file is replaced or written into."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def _tensors(path: Path, bits: Width) -> list[StoredTensor]:
    """Return the tensors of one width, in the order of the file."""
    shard = Shard(path)
    shard.close()
    tensors = [
        tensor for name, tensor in shard.tensors.items() if name.startswith(f"{label(bits)}.")
    ]
    if not tensors:
        raise BadInput(f"{path} holds no replica of {bits} bits: run moectl quantize --bits {bits}")
    return sorted(tensors, key=lambda tensor: tensor.offset)
