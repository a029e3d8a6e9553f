"""What a model in GGUF files costs, by their headers alone: without torch, so that a plan takes no time."""

import re
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from artifacts.errors import BadInput
from artifacts.formats.gguf_header import BLOCKS, PLAIN, GgufHeader, GgufTensor, StoredType, read_header
from artifacts.modelshapes.known import ModelShape
from artifacts.modelshapes.memory import BackboneMemory
from artifacts.shape import Shape
from runtime.model.gguf_architectures import architecture_of, check_computed, head_dim
from runtime.model.locate import parts_of

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.weight")
_TYPES = PLAIN | BLOCKS


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The shape of a model, what it needs besides experts, the types of its experts as `Q4_K and Q6_K`, and the dtype
    that it is computed in."""

    shape: ModelShape
    memory: BackboneMemory
    types: str
    dtype: str


def gguf_model(path: Path) -> GgufModel:
    """Look at the headers of a GGUF file and of those that belong to it. Raises BadInput for a file that is not whole,
    and for a model that moectl does not read."""
    headers = [_header(part) for part in parts_of(path)]
    tensors = [tensor for header in headers for tensor in header.tensors]
    form, own = architecture_of(path, headers[0].entries)
    types = dict.fromkeys(_type(path, tensor).name for tensor in tensors if _EXPERTS.fullmatch(tensor.name))
    try:
        check_computed(path, form, own)
        shape, memory = _shape(path, tensors, own), _memory(path, tensors, own)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadInput(f"{path} does not say what its model needs ({error}): download it again") from error
    return GgufModel(shape, memory, " and ".join(types), _dtype(path, tensors))


def _header(path: Path) -> GgufHeader:
    try:
        header, nbytes = read_header(path), path.stat().st_size
    except (ValueError, OSError, struct.error, OverflowError, MemoryError) as error:
        raise BadInput(f"{path} is missing, truncated or no GGUF file: download it again") from error
    for tensor in header.tensors:
        if header.start + tensor.offset + _nbytes(path, tensor) > nbytes:
            raise BadInput(f"{path} ends within {tensor.name}: it is truncated, download it again")
    return header


def _shape(path: Path, tensors: list[GgufTensor], own: dict) -> ModelShape:
    experts, by_layer = [tensor for tensor in tensors if _EXPERTS.fullmatch(tensor.name)], Counter()
    for tensor in experts:
        by_layer[_EXPERTS.fullmatch(tensor.name)[1]] += _nbytes(path, tensor)
    num_experts, whole, dtype_nbytes = own["expert_count"], sum(by_layer.values()), _dtype_nbytes(path, tensors)
    largest, mean = max(by_layer.values()) // num_experts, round(whole / len(by_layer) / num_experts)
    shared = sum(prod(tensor.shape) for tensor in tensors if "_shexp." in tensor.name)
    note = f"experts of {mean:,} bytes, their mean: those of some layers have {largest:,}, and so has a slot"
    return ModelShape(
        name=path.name,
        shape=Shape(len(by_layer), num_experts, own["expert_used_count"], mean),
        hidden=own["embedding_length"],
        shared_nbytes=shared // len(by_layer) * dtype_nbytes,
        vocabulary={tensor.name: tensor.shape[0] for tensor in tensors}["token_embd.weight"],
        weight_nbytes=whole / sum(prod(tensor.shape) for tensor in experts),
        dtype_nbytes=dtype_nbytes,
        assumed=(note,) if largest > mean else (),
    )


def _memory(path: Path, tensors: list[GgufTensor], own: dict) -> BackboneMemory:
    others, dtype_nbytes = [each for each in tensors if not _EXPERTS.fullmatch(each.name)], _dtype_nbytes(path, tensors)
    width = 2 * own.get("attention.head_count_kv", own["attention.head_count"]) * head_dim(own)
    return BackboneMemory(
        weights_nbytes=sum(prod(each.shape) for each in others) * dtype_nbytes,
        stored_nbytes=sum(_nbytes(path, each) for each in others),
        cache_nbytes=own["block_count"] * width * dtype_nbytes,
    )


def _dtype_nbytes(path: Path, tensors: list[GgufTensor]) -> int:
    return 4 if _dtype(path, tensors) == "float32" else 2


def _dtype(path: Path, tensors: list[GgufTensor]) -> str:
    """The dtype of a model in memory: that of the largest tensor, bfloat16 where it is packed."""
    largest = max(tensors, key=lambda each: _nbytes(path, each)).type
    return PLAIN[largest].name if largest in PLAIN else "bfloat16"


def _nbytes(path: Path, tensor: GgufTensor) -> int:
    type_ = _type(path, tensor)
    return prod(tensor.shape) // type_.num_weights * type_.nbytes


def _type(path: Path, tensor: GgufTensor) -> StoredType:
    if tensor.type not in _TYPES:
        raise BadInput(f"{path}: {tensor.name} is of ggml's type {tensor.type}, which moectl does not read")
    return _TYPES[tensor.type]
