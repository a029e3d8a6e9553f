"""Shape and memory needs of a model in GGUF files, from their headers alone: without torch, so that
a plan takes no time."""

import re
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path

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
_ROUTERS = ("ffn_gate_inp.", "ffn_gate_inp_shexp.", "ffn_gate_tid2eid.")
_DTYPES = {"F32": "float32", "F16": "float16"}  # any other is computed in bfloat16
_Tensors = list[GgufTensor]


def gguf_shape(path: Path, *, dense: int | None = None) -> tuple[ModelShape, BackboneMemory]:
    """Return the shape of the model of a GGUF file, and what it needs besides experts, with linear
    layers at `dense` bits if that is given. Raises BadInput."""
    headers = read_headers(path)
    _, own = architecture_of(path, headers[0].entries)
    every = [tensor for header in headers for tensor in header.tensors.values()]
    try:
        drafting = [tensor for tensor in every if _block(tensor) >= num_layers(own)]
        tensors = [tensor for tensor in every if _block(tensor) < num_layers(own)]
        experts = [tensor for tensor in tensors if _EXPERTS.fullmatch(tensor.name)]
        dtype_nbytes = 4 if gguf_dtype(path) == "float32" else 2
        memory = _memory(tensors, experts, own, dtype_nbytes, dense)
        drafted = sum(tensor.nbytes for tensor in drafting)
        return _shape(path, tensors, experts, own, dtype_nbytes), replace(
            memory, stored_nbytes=memory.stored_nbytes + drafted, drafting_nbytes=drafted
        )
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadInput(
            f"{path} does not say what its model needs ({error}): download it again"
        ) from error


def _block(tensor: GgufTensor) -> int:
    """Return the layer of a tensor, -1 for one of none."""
    found = _BLOCK.match(tensor.name)
    return int(found[1]) if found else -1


def gguf_dtype(path: Path) -> str:
    """Return the dtype that a model is computed in, which no file names: the dtype of its largest
    tensor, or bfloat16."""
    tensors = (tensor for header in read_headers(path) for tensor in header.tensors.values())
    return _DTYPES.get(max(tensors, key=lambda tensor: tensor.nbytes).type.name, "bfloat16")


def gguf_types(path: Path) -> str:
    """Return the types of the experts, as `Q4_K and Q6_K`."""
    tensors = (tensor for header in read_headers(path) for tensor in header.tensors.values())
    names = (tensor.type.name for tensor in tensors if tensor.name.endswith("_exps.weight"))
    return " and ".join(dict.fromkeys(names))


def _shape(
    path: Path, tensors: _Tensors, experts: _Tensors, own: dict, dtype_nbytes: int
) -> ModelShape:
    by_layer: Counter[str] = Counter()
    for tensor in experts:
        layer, _, kind = _EXPERTS.fullmatch(tensor.name).groups()
        by_layer[layer] += tensor.nbytes if kind == "weight" else prod(tensor.shape) * dtype_nbytes
    num_experts = own["expert_count"]
    whole = sum(by_layer.values())
    largest = max(by_layer.values()) // num_experts
    mean = round(whole / len(by_layer) / num_experts)
    shared = sum(prod(tensor.shape) for tensor in tensors if "_shexp." in tensor.name)
    attention = sum(
        prod(tensor.shape)
        for tensor in tensors
        if ".attn_" in tensor.name and len(tensor.shape) == 2
    )
    note = (
        f"experts of {mean:,} bytes, their mean: those of some layers have {largest:,}, and so "
        "has a slot"
    )
    return ModelShape(
        name=path.name,
        shape=Shape(len(by_layer), num_experts, own["expert_used_count"], mean),
        hidden=own["embedding_length"],
        shared_nbytes=shared // len(by_layer) * dtype_nbytes,
        vocabulary={tensor.name: tensor.shape[0] for tensor in tensors}["token_embd.weight"],
        weight_nbytes=whole / sum(prod(tensor.shape) for tensor in experts),
        dtype_nbytes=dtype_nbytes,
        attention_weights=attention // num_layers(own),
        assumed=(note,) if largest > mean else (),
    )


def _memory(
    tensors: _Tensors, experts: _Tensors, own: dict, dtype_nbytes: int, dense: int | None
) -> BackboneMemory:
    names = {tensor.name for tensor in experts}
    others = [tensor for tensor in tensors if tensor.name not in names]
    is_tied = all(tensor.name != "output.weight" for tensor in others)
    nbytes = 0.0
    for tensor in others:
        if tensor.name == IN_GGUF:
            continue
        is_linear = len(tensor.shape) == 2 and (is_tied or tensor.name != "token_embd.weight")
        if is_linear and not any(part in tensor.name for part in _ROUTERS):
            nbytes += dense_nbytes(*tensor.shape, bits=dense, dtype_nbytes=dtype_nbytes)
        else:
            nbytes += prod(tensor.shape) * dtype_nbytes
    return BackboneMemory(
        weights_nbytes=round(nbytes),
        stored_nbytes=sum(tensor.nbytes for tensor in others),
        cache_nbytes=round(_cached(others, own) * dtype_nbytes),
        tables_nbytes=sum(tensor.nbytes for tensor in others if tensor.name == IN_GGUF),
    )


def _cached(tensors: _Tensors, own: dict) -> float:
    """Return how many numbers are cached per token: keys and values, which may be the same, and
    keys of indexers, or with latent attention the numbers that both are computed from. Of tokens
    that are compressed into one (DeepSeek-V4), each has its part of that one."""
    rows = {tensor.name: tensor.shape[0] for tensor in tensors if tensor.shape}
    of_indexers = sum(rows[name] for name in rows if re.search(r"\.indexer\.(k_proj|attn_k)", name))
    if "attention.indexer.kpool" in own:  # whose keys have a gate, and say whether they count
        of_indexers += of_indexers + sum(".indexer.attn_k" in name for name in rows)
    if "attention.kv_lora_rank" in own:
        of_layers = own.get("attention.head_count_kv", 1)
        is_hybrid = isinstance(of_layers, list)
        depth = sum(map(bool, of_layers)) if is_hybrid else num_layers(own)
        width = own["attention.kv_lora_rank"] + own["rope.dimension_count"]
        return depth * width + of_indexers
    keys = [name for name in rows if name.endswith(".attn_k.weight")]
    of_values = sum(rows.get(name.replace("attn_k", "attn_v"), rows[name]) for name in keys)
    compressed = ((_COMPRESSED.fullmatch(name), count) for name, count in rows.items())
    ratios = own.get("attention.compress_ratios")
    of_compressed = sum(count / ratios[int(layer[1])] for layer, count in compressed if layer)
    return sum(rows[name] for name in keys) + of_values + of_indexers + of_compressed
