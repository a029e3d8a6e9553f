"""What a model in GGUF files costs, by their headers alone: without torch, so that a plan takes no time."""

import re
import struct
from collections import Counter
from math import prod
from pathlib import Path

from artifacts.errors import BadInput
from artifacts.formats.gguf_header import SIZES, GgufHeader, GgufTensor, read_header
from artifacts.modelshapes.known import ModelShape
from artifacts.modelshapes.memory import BackboneMemory
from artifacts.shape import Shape
from runtime.model.gguf_architectures import architecture_of
from runtime.model.locate import parts_of

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.weight")
_FLOAT32 = 0


def gguf_shape(path: Path) -> tuple[ModelShape, BackboneMemory]:
    """Return the shape of the model of a GGUF file, and what it needs besides experts. Raises BadInput."""
    headers = [_header(part) for part in parts_of(path)]
    tensors = [tensor for header in headers for tensor in header.tensors]
    _, own = architecture_of(path, headers[0].entries)
    try:
        return _shape(path, tensors, own), _memory(path, tensors, own)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadInput(f"{path} does not say what its model needs ({error}): download it again") from error


def _header(path: Path) -> GgufHeader:
    try:
        return read_header(path)
    except (ValueError, OSError, struct.error, OverflowError, MemoryError) as error:
        raise BadInput(f"{path} is missing, truncated or no GGUF file: download it again") from error


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
    heads = own["attention.head_count"]
    head_dim = own.get("attention.key_length") or own["embedding_length"] // heads
    width = 2 * own.get("attention.head_count_kv", heads) * head_dim
    return BackboneMemory(
        weights_nbytes=sum(prod(each.shape) for each in others) * dtype_nbytes,
        stored_nbytes=sum(_nbytes(path, each) for each in others),
        cache_nbytes=own["block_count"] * width * dtype_nbytes,
    )


def _dtype_nbytes(path: Path, tensors: list[GgufTensor]) -> int:
    """Bytes of a weight in memory: in float32 only where the largest tensor is."""
    return 4 if max(tensors, key=lambda each: _nbytes(path, each)).type == _FLOAT32 else 2


def _nbytes(path: Path, tensor: GgufTensor) -> int:
    if tensor.type not in SIZES:
        raise BadInput(f"{path}: {tensor.name} is of ggml's type {tensor.type}, which moectl does not read")
    weights, nbytes = SIZES[tensor.type]
    return prod(tensor.shape) // weights * nbytes
