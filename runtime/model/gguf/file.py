"""Tensors of GGUF files: where each lies, and which of them are matrices in few bits."""

import re
from pathlib import Path

import torch

from artifacts.errors import BadInput
from artifacts.formats.gguf.ggml import GGML
from artifacts.formats.gguf.gguf_header import INTEGERS, PLAIN, GgufTensor, read_header
from runtime.model.files.checkpoint import Checkpoint, Contents, Shard, StoredTensor
from runtime.model.files.locate import parts_of
from runtime.model.quantised.quantised_tensor import QuantisedTensor, Tensors

_DTYPES = dict(zip(PLAIN, (torch.float32, torch.float16, torch.bfloat16), strict=True))
_DTYPES[INTEGERS] = torch.int32
_CONSTANT = re.compile(r"\w+\.ple\.(layer_multipliers|head_offsets|head_vocab_sizes)")
"""Arrays of the header that are buffers of the model: how Qwen4-Exp hashes n-grams."""


class GgufShard(Shard):
    """One open GGUF file; a tensor in few bits is uint8 [..., bytes of a row], and `types` has the
    name of its type. Arrays of the header that are buffers are among the tensors.

    Raises BadInput if the file is missing, truncated, no GGUF file, or has a tensor of a type that
    is not read.
    """

    types: dict[str, str]

    def _check_whole(self) -> None:
        read_header(self.path)

    def _contents(self) -> Contents:
        header = read_header(self.path)
        self.types = {
            name: each.type.name
            for name, each in header.tensors.items()
            if each.type not in _DTYPES
        }
        constants = {
            key: StoredTensor(key, torch.int64, (array.count,), self, array.position, array.nbytes)
            for key, array in header.arrays.items()
            if _CONSTANT.fullmatch(key) and array.nbytes == 8 * array.count
        }
        tensors = {name: self._stored(each) for name, each in header.tensors.items()}
        return Contents(header.digest, {}, tensors | constants)

    def _stored(self, tensor: GgufTensor) -> StoredTensor:
        place = self, tensor.offset, tensor.nbytes
        if tensor.type in _DTYPES:
            return StoredTensor(tensor.name, _DTYPES[tensor.type], tensor.shape, *place)
        *outer, row = tensor.shape
        return StoredTensor(
            tensor.name,
            torch.uint8,
            (*outer, row // tensor.type.num_weights * tensor.type.nbytes),
            *place,
        )


def open_gguf(path: Path) -> Checkpoint:
    """Open the files of a model and read only their headers; BadInput names the file that cannot be
    used."""
    shards = tuple(GgufShard(part) for part in parts_of(path))
    return Checkpoint(
        path, shards, {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
    )


def gguf_matrices(checkpoint: Checkpoint) -> Tensors:
    """Return the tensors of GGUF files by their names there; quantised ones become matrices in few
    bits.

    A matrix in NVFP4 takes the scale beside it, of one number or of one for each expert, by which
    llama.cpp multiplies products. The scale of activations there is left out. Raises BadInput for a
    scale that does not fit.
    """
    tensors = dict(checkpoint.tensors)
    scales = {}
    for name, tensor in checkpoint.tensors.items():
        if tensor.shard.types.get(name) == "NVFP4":
            stem = name.removesuffix("weight")
            scales[name] = tensors.pop(f"{stem}scale", None)
            tensors.pop(f"{stem}input_scale", None)
    return {name: _matrix(tensor, scales.get(name)) for name, tensor in tensors.items()}


def _matrix(tensor: StoredTensor, scale: StoredTensor | None) -> StoredTensor | QuantisedTensor:
    if tensor.name not in tensor.shard.types:
        return tensor
    form = GGML[tensor.shard.types[tensor.name]]
    shape = (*tensor.shape[:-1], tensor.shape[-1] // form.nbytes * form.num_weights)
    if scale is None:
        return QuantisedTensor(tensor.name, form, {"blocks": tensor}, shape)
    if scale.dtype is not torch.float32 or scale.shape != (tensor.shape[:-2] or (1,)):
        raise BadInput(
            f"{tensor.name} has {list(tensor.shape[:-1])} rows, and its scale the shape "
            f"{list(scale.shape)}: download it again"
        )
    return QuantisedTensor(tensor.name, form, {"blocks": tensor, "scale": scale}, shape)
