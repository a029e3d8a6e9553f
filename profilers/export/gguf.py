"""Writes a whole model as one GGUF file, which llama.cpp reads, and moectl too."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from artifacts.common.files import check_writable, replacing
from artifacts.errors import BadInput
from artifacts.formats.gguf.gguf_header import TYPES as GGML_TYPES
from artifacts.formats.gguf.gguf_header import read_header
from profilers.export.gguf_vocabulary import add_vocabulary
from profilers.quantise.method import projections
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.gguf.architectures import ARCHITECTURES
from runtime.model.layers import MoeLayer
from runtime.model.layout import aligned
from runtime.model.open import MoeModel

Progress = Callable[[int, int], None]
WRITTEN = {ARCHITECTURES[name].family: name for name in ("olmoe", "qwen2moe", "qwen3moe")}
"""The architectures that are written, by `model_type`."""

_BESIDES = {"attention.value_length": "head_dim", "block_count": "num_hidden_layers"}
"""Entries that llama.cpp wants and no table of an architecture has."""
_BLOCK = re.compile(r"\.layers\.(\d+)\.")
_ROUTERS = ("ffn_gate_inp.", "ffn_gate_inp_shexp.")
_PARTS = ("gate", "up", "down")


class GgufType(NamedTuple):
    """The types of ggml for experts and for other matrices, and the name of the mixture; norms and
    routers are F32."""

    experts: str
    others: str
    mixture: str


TYPES = {
    "f32": GgufType("F32", "F32", "ALL_F32"),
    "f16": GgufType("F16", "F16", "MOSTLY_F16"),
    "bf16": GgufType("BF16", "BF16", "MOSTLY_BF16"),
    "q8_0": GgufType("Q8_0", "Q8_0", "MOSTLY_Q8_0"),
    "q4_0": GgufType("Q4_0", "Q4_0", "MOSTLY_Q4_0"),
    "mxfp4": GgufType("MXFP4", "Q8_0", "MOSTLY_MXFP4_MOE"),
}


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    type: str


_Tensors = Mapping[str, _Tensor]
_Piece = tuple[str, torch.Tensor]  # the next rows of the tensor of this name


def export_gguf(
    opened: MoeModel,
    folder: Path,
    out: Path,
    type_: str,
    *,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the model to the file `out` in one of `TYPES`, whole or not at all; `folder` has its
    tokenizer.

    Rows that are no whole number of a type's blocks are F16. Raises BadInput for a model that
    llama.cpp would not compute as it is; OutOfResources when the disk is full.
    """
    _check(opened)
    check_writable(out)
    import gguf

    config = opened.model.config
    kind = TYPES[type_]
    architecture = WRITTEN[config.model_type]
    [known] = (each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    others = dict(_others(opened, names.get_name))
    tensors = {
        name: _Tensor(tuple(each.shape), _type_of(name, each, kind))
        for name, each in others.items()
    }
    tensors |= _experts(opened, kind)
    with replacing(out) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture)
        writer.add_file_type(gguf.LlamaFileType[kind.mixture])
        _add_config(writer, config)
        add_vocabulary(writer, folder, config.vocab_size)
        _write_header(writer, tensors)
        total = len(others) + len(_PARTS) * opened.shape.num_keys
        _fill(
            temporary,
            tensors,
            chain(others.items(), _pieces(opened)),
            lambda done: progress(done, total),
        )


def _write_header(writer: "gguf.GGUFWriter", tensors: _Tensors) -> None:  # noqa: F821
    """Write the entries, and leave room for the tensors."""
    from gguf import GGMLQuantizationType, quant_shape_to_byte_shape

    nbytes = 0
    for name, tensor in tensors.items():
        type_ = GGMLQuantizationType[tensor.type]
        shape = quant_shape_to_byte_shape(tensor.shape, type_)
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), prod(shape), raw_dtype=type_)
        nbytes += writer.ggml_pad(prod(shape), writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    [file] = writer.fout
    file.truncate(writer.ggml_pad(file.tell(), writer.data_alignment) + nbytes)
    writer.close()


def _fill(
    path: Path, tensors: _Tensors, pieces: Iterator[_Piece], progress: Callable[[int], None]
) -> None:
    """Write every piece to its place, where only one is in memory: so an expert, whose parts lie in
    three tensors, is read once."""
    from gguf import GGMLQuantizationType, quants

    places = {name: tensor.offset for name, tensor in read_header(path).tensors.items()}
    with path.open("r+b") as file:
        for done, (name, numbers) in enumerate(pieces, 1):
            encoded = quants.quantize(
                numbers.float().numpy(), GGMLQuantizationType[tensors[name].type]
            )
            file.seek(places[name])
            file.write(encoded)
            places[name] += encoded.nbytes
            progress(done)


def _check(opened: MoeModel) -> None:
    """Raise BadInput for a model that `export_gguf` does not write."""
    config = opened.model.config
    if config.model_type not in WRITTEN:
        raise BadInput(
            f"{config.model_type} is not written as GGUF: moectl writes {', '.join(WRITTEN)}"
        )
    # for granted
    taken = ARCHITECTURES[WRITTEN[config.model_type]].fixed.get("norm_topk_prob", False)
    scaling = config.rope_parameters.get("rope_type", "default")
    unusual = {
        f"positions scaled ({scaling})": scaling != "default",
        f"norm_topk_prob {config.norm_topk_prob}": config.norm_topk_prob != taken,
        "layers without experts": len(opened.layers) != config.num_hidden_layers,
        "clip_qkv": getattr(config, "clip_qkv", None) is not None,
        "a sliding window": getattr(config, "use_sliding_window", False),
    }
    for what, is_so in unusual.items():
        if is_so:
            raise BadInput(
                f"this {config.model_type} has {what}, which llama.cpp would not follow: not "
                "written as GGUF"
            )


def _add_config(writer: "gguf.GGUFWriter", config: object) -> None:  # noqa: F821
    for theirs, ours in (ARCHITECTURES[writer.arch].fields | _BESIDES).items():
        value = getattr(config, ours, None)
        if value is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{writer.arch}.{theirs}", value)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _others(opened: MoeModel, name_of: Callable[[str], str]) -> Iterator[_Piece]:
    """The parameters besides experts, the head too where it is the embedding: llama.cpp mostly
    wants both."""
    for name, parameter in opened.model.state_dict().items():
        if not parameter.is_meta:
            stem, _, ending = name.rpartition(".")
            # of one output: a row in the files
            row = parameter[0] if "shared_expert_gate" in name else parameter
            yield f"{name_of(stem)}.{ending}", row


def _type_of(name: str, tensor: torch.Tensor, kind: GgufType) -> str:
    is_plain = tensor.dim() == 1 or any(part in name for part in _ROUTERS)
    return "F32" if is_plain else _fitting(kind.others, tensor.shape)


def _experts(opened: MoeModel, kind: GgufType) -> _Tensors:
    count = opened.shape.num_experts
    tensors = {}
    for layer in opened.layers:
        neurons = projections(layer)[GATE_UP][0] // 2
        for part in _PARTS:
            shape = (layer.hidden_size, neurons) if part == "down" else (neurons, layer.hidden_size)
            tensors[_name(layer, part)] = _Tensor((count, *shape), _fitting(kind.experts, shape))
    return tensors


def _pieces(opened: MoeModel) -> Iterator[_Piece]:
    """The parts of one expert after another, [rows, columns] each, in memory that is used again."""
    store = opened.store
    buffer = aligned(store.layout.nbytes)
    for layer in opened.layers:
        for expert in range(opened.shape.num_experts):
            store.read(layer.index, expert, buffer)
            weights = store.layout.weights(buffer)
            gate, up = weights[GATE_UP].chunk(2)
            for part, rows in zip(_PARTS, (gate, up, weights[DOWN]), strict=True):
                yield _name(layer, part), rows


def _name(layer: MoeLayer, part: str) -> str:
    return f"blk.{_BLOCK.search(layer.name)[1]}.ffn_{part}_exps.weight"


def _fitting(type_: str, shape: Sequence[int]) -> str:
    return "F16" if shape[-1] % GGML_TYPES[type_].num_weights else type_
