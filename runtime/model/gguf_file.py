"""GGUF files: which belong together, where each tensor lies in them, and which of these hold matrices in few bits."""

import hashlib
import os
import struct
from functools import lru_cache
from math import prod
from pathlib import Path
from textwrap import shorten

import torch

from artifacts.errors import BadInput
from artifacts.formats.ggml import GGML
from artifacts.formats.gguf_header import BLOCKS, PLAIN, GgufHeader, read_header
from runtime.model.checkpoint import Checkpoint, Contents, Shard, StoredTensor
from runtime.model.locate import parts_of
from runtime.model.quantised_tensor import QuantisedTensor, Tensors

_PLAIN = {number: getattr(torch, each.name) for number, each in PLAIN.items()}
_OTHERS = {3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS"}
_OTHERS |= {19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 40: "NVFP4"}
_READ = ", ".join(("F32", "F16", "BF16", *GGML))


@lru_cache(maxsize=64)  # an opening asks several times
def _header(path: Path, stamp: tuple[int, int]) -> GgufHeader:
    """Read the header of the file as of its `stamp`. Raises BadInput."""
    try:
        return read_header(path)
    except (ValueError, OSError, struct.error, OverflowError, MemoryError) as error:
        reason = shorten(str(error), 160)
        raise BadInput(f"{path} is truncated or no GGUF file ({reason}): download it again") from error


class GgufShard(Shard):
    """One open GGUF file; a tensor in few bits is uint8 [..., bytes of a row], and `types` has the name of its type.
    `entries` are what the header says besides tensors; of arrays of strings it has the lengths.

    Raises BadInput if the file is missing, truncated, no GGUF file, or has a tensor of a type that is not read.
    """

    types: dict[str, str]
    entries: dict[str, object]

    def _check_whole(self) -> None:
        if not self.path.is_file():
            raise BadInput(f"{self.path} is missing: the model is in several files, so download this one too")
        if not os.access(self.path, os.R_OK):
            raise BadInput(f"{self.path} cannot be read: permission denied")

    def _contents(self) -> Contents:
        header = _header(self.path, self._stamp)
        self.entries, self.types = header.entries, {}
        tensors = {each.name: self._tensor(*each, start=header.start) for each in header.tensors}
        if len(tensors) < len(header.tensors):
            raise BadInput(f"{self.path} has two tensors of one name: download it again")
        return Contents(hashlib.sha256(header.content).digest(), {}, tensors)

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int, *, start: int) -> StoredTensor:
        dtype = _PLAIN.get(number, torch.uint8)
        if dtype is torch.uint8:
            shape = self._in_bytes(name, shape, number)
        nbytes = prod(shape) * dtype.itemsize
        if start + offset + nbytes > self.nbytes:
            raise BadInput(f"{self.path} ends within {name}: it is truncated, download it again")
        return StoredTensor(name, dtype, shape, self, start + offset, nbytes)

    def _in_bytes(self, name: str, shape: tuple[int, ...], number: int) -> tuple[int, ...]:
        """The shape of a tensor of blocks, its last dimension in bytes."""
        if number not in BLOCKS:
            shown = _OTHERS.get(number, f"the unknown type {number}")
            raise BadInput(f"{self.path}: {name} is {shown}, and moectl reads {_READ}: take a file of these types")
        self.types[name] = BLOCKS[number].name
        form = GGML[self.types[name]]
        if not shape or shape[-1] % form.num_weights:
            raise BadInput(f"{self.path}: {name} has rows of {shape[-1:]} in {form.name}: download it again")
        return (*shape[:-1], shape[-1] // form.num_weights * form.nbytes)


def open_parts(path: Path) -> tuple[GgufShard, ...]:
    """Open a GGUF file, and where its name says that it is one of several parts, all of them."""
    return tuple(GgufShard(part) for part in parts_of(path))


def open_gguf(path: Path) -> Checkpoint:
    """Open the files of a model and read only their headers; BadInput names the file that cannot be used."""
    shards = open_parts(path)
    return Checkpoint(path, shards, {name: tensor for shard in shards for name, tensor in shard.tensors.items()})


def gguf_matrices(checkpoint: Checkpoint) -> Tensors:
    """The tensors of GGUF files by their names there, those of blocks as matrices in few bits."""
    return {name: _matrix(tensor) for name, tensor in checkpoint.tensors.items()}


def _matrix(tensor: StoredTensor) -> StoredTensor | QuantisedTensor:
    if tensor.name not in tensor.shard.types:
        return tensor
    form = GGML[tensor.shard.types[tensor.name]]
    shape = (*tensor.shape[:-1], tensor.shape[-1] // form.nbytes * form.num_weights)
    return QuantisedTensor(tensor.name, form, {"blocks": tensor}, shape)
