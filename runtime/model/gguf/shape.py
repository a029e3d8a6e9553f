"""Shape and memory needs of a model in GGUF files, from their headers alone: without torch, so that
a plan takes no time."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

from artifacts.errors import BadInput
from artifacts.formats.dense import dense_nbytes
from artifacts.formats.gguf.gguf_header import GgufTensor
from artifacts.modelshapes.known import ModelShape
from artifacts.modelshapes.memory import BackboneMemory
from artifacts.modelshapes.row_tables import IN_GGUF
from artifacts.shape import Shape
from runtime.model.gguf.architectures import architecture_of
from runtime.model.gguf.config import read_headers
from runtime.model.gguf.layout import num_layers

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_COMPRESSED = re.compile(r"blk\.(\d+)\.\w+_compressor_norm\.weight")
_INDEXED = re.compile(r"\.indexer\.(k_proj|attn_k)")
_ROUTERS = ("ffn_gate_inp.", "ffn_gate_inp_shexp.", "ffn_gate_tid2eid.")
_DTYPES = {"F32": "float32", "F16": "float16"}  # any other is computed in bfloat16


class _Parts(NamedTuple):
    """The tensors of a model: routed experts, layers that predict further tokens, and others."""

    experts: list[GgufTensor]
    drafting: list[GgufTensor]
    others: list[GgufTensor]

    @classmethod
    def of(cls, path: Path, depth: int) -> "_Parts":
        """Divide the tensors of a file whose model has so many layers."""
        parts = cls([], [], [])
        for tensor in _tensors(path):
            block = _BLOCK.match(tensor.name)
            if block and int(block[1]) >= depth:
                parts.drafting.append(tensor)
            elif _EXPERTS.fullmatch(tensor.name):
                parts.experts.append(tensor)
            else:
                parts.others.append(tensor)
        return parts


def gguf_shape(path: Path, *, dense: int | None = None) -> tuple[ModelShape, BackboneMemory]:
    """Return the shape of the model of a GGUF file, and what it needs besides experts, with linear
    layers at `dense` bits if that is given. Raises BadInput."""
    _, own = architecture_of(path, read_headers(path)[0].entries)
    try:
        parts = _Parts.of(path, num_layers(own))
        dtype_nbytes = 4 if gguf_dtype(path) == "float32" else 2
        model = _shape(path.name, parts, own, dtype_nbytes)
        return model, _memory(parts, own, dtype_nbytes, dense)
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadInput(
            f"{path} does not say what its model needs ({error}): download it again"
        ) from error


def _tensors(path: Path) -> Iterable[GgufTensor]:
    return (tensor for header in read_headers(path) for tensor in header.tensors.values())


def gguf_dtype(path: Path) -> str:
    """Return the dtype that a model is computed in, which no file names: the dtype of its largest
    tensor, or bfloat16."""
    largest = max(_tensors(path), key=lambda tensor: tensor.nbytes)
    return _DTYPES.get(largest.type.name, "bfloat16")


def gguf_types(path: Path) -> str:
    """Return the types of the experts, as `Q4_K and Q6_K`."""
    experts = (tensor for tensor in _tensors(path) if tensor.name.endswith("_exps.weight"))
    return " and ".join(dict.fromkeys(tensor.type.name for tensor in experts))


def _shape(name: str, parts: _Parts, own: Mapping, dtype_nbytes: int) -> ModelShape:
    by_layer = _nbytes_by_layer(parts.experts, dtype_nbytes)
    num_experts = own["expert_count"]
    depth = len(by_layer)
    whole = by_layer.total()
    mean = round(whole / depth / num_experts)
    shared = (tensor for tensor in parts.others if "_shexp." in tensor.name)
    return ModelShape(
        name,
        Shape(depth, num_experts, own["expert_used_count"], mean),
        own["embedding_length"],
        _num_weights(shared) // depth * dtype_nbytes,
        _rows(parts.others)["token_embd.weight"],
        weight_nbytes=whole / _num_weights(parts.experts),
        dtype_nbytes=dtype_nbytes,
        attention_weights=_attention_weights(parts.others) // num_layers(own),
        assumed=_assumed(mean, max(by_layer.values()) // num_experts),
    )


def _assumed(mean: int, largest: int) -> tuple[str, ...]:
    """Say that experts are taken as equally large where those of some layers are larger."""
    note = (
        f"experts of {mean:,} bytes, their mean: those of some layers have {largest:,}, and so "
        "has a slot"
    )
    return (note,) if largest > mean else ()


def _nbytes_by_layer(experts: Iterable[GgufTensor], dtype_nbytes: int) -> Counter[str]:
    """Return the bytes of the experts of each layer: weights as stored, biases as computed with."""
    by_layer: Counter[str] = Counter()
    for tensor in experts:
        layer, _, kind = _EXPERTS.fullmatch(tensor.name).groups()
        by_layer[layer] += tensor.nbytes if kind == "weight" else prod(tensor.shape) * dtype_nbytes
    return by_layer


def _attention_weights(tensors: Iterable[GgufTensor]) -> int:
    return _num_weights(
        tensor for tensor in tensors if ".attn_" in tensor.name and len(tensor.shape) == 2
    )


def _num_weights(tensors: Iterable[GgufTensor]) -> int:
    return sum(prod(tensor.shape) for tensor in tensors)


def _rows(tensors: Iterable[GgufTensor]) -> dict[str, int]:
    return {tensor.name: tensor.shape[0] for tensor in tensors if tensor.shape}


def _memory(parts: _Parts, own: Mapping, dtype_nbytes: int, dense: int | None) -> BackboneMemory:
    tables = [tensor for tensor in parts.others if tensor.name == IN_GGUF]
    resident = [tensor for tensor in parts.others if tensor.name != IN_GGUF]
    drafting = _nbytes(parts.drafting)
    return BackboneMemory(
        weights_nbytes=round(_weights_nbytes(resident, dtype_nbytes, dense)),
        stored_nbytes=_nbytes(parts.others) + drafting,
        cache_nbytes=round(_cached(resident, own) * dtype_nbytes),
        tables_nbytes=_nbytes(tables),
        drafting_nbytes=drafting,
    )


def _weights_nbytes(tensors: list[GgufTensor], dtype_nbytes: int, dense: int | None) -> float:
    """Return the bytes in memory, where linear layers have `dense` bits; embeddings are one if the
    head is made of them."""
    is_tied = all(tensor.name != "output.weight" for tensor in tensors)
    unpacked = _ROUTERS if is_tied else (*_ROUTERS, "token_embd.weight")
    nbytes = 0.0
    for tensor in tensors:
        if len(tensor.shape) == 2 and not any(part in tensor.name for part in unpacked):
            nbytes += dense_nbytes(*tensor.shape, bits=dense, dtype_nbytes=dtype_nbytes)
        else:
            nbytes += prod(tensor.shape) * dtype_nbytes
    return nbytes


def _nbytes(tensors: Iterable[GgufTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _cached(tensors: Iterable[GgufTensor], own: Mapping) -> float:
    """Return how many numbers are cached per token: keys and values, which may be the same, and
    keys of indexers, or with latent attention the numbers that both are computed from. Of tokens
    that are compressed into one (DeepSeek-V4), each has its part of that one."""
    rows = _rows(tensors)
    cached = _cached_by_indexers(rows, own)
    if "attention.kv_lora_rank" in own:
        heads = own.get("attention.head_count_kv", 1)
        depth = sum(map(bool, heads)) if isinstance(heads, list) else num_layers(own)
        return cached + depth * (own["attention.kv_lora_rank"] + own["rope.dimension_count"])
    ratios = own.get("attention.compress_ratios")
    for name, count in rows.items():
        if name.endswith(".attn_k.weight"):
            cached += count + rows.get(name.replace("attn_k", "attn_v"), count)
        elif compressed := _COMPRESSED.fullmatch(name):
            cached += count / ratios[int(compressed[1])]
    return cached


def _cached_by_indexers(rows: Mapping[str, int], own: Mapping) -> int:
    keys = sum(count for name, count in rows.items() if _INDEXED.search(name))
    if "attention.indexer.kpool" not in own:
        return keys
    # their keys have a gate, and say whether they count
    return 2 * keys + sum(".indexer.attn_k" in name for name in rows)
