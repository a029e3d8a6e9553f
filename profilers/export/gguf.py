"""Writes a whole model as one GGUF file, which llama.cpp reads, and moectl too."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from artifacts.common.files import check_writable, replacing
from artifacts.errors import BadInput
from artifacts.formats.gguf_header import TYPES as GGML_TYPES
from profilers.export.gguf_vocabulary import add_vocabulary
from profilers.quantise.method import projections
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.gguf_architectures import ARCHITECTURES
from runtime.model.layers import MoeLayer
from runtime.model.layout import aligned
from runtime.model.open import MoeModel

Progress = Callable[[int, int], None]
WRITTEN = {ARCHITECTURES[name].family: name for name in ("olmoe", "qwen2moe", "qwen3moe")}
"""The architectures that are written, by `model_type`."""

_VALUE_LENGTH = "attention.value_length"  # which llama.cpp wants besides, and moectl does not read
_BLOCK = re.compile(r"\.layers\.(\d+)\.")
_ROUTERS = ("ffn_gate_inp.", "ffn_gate_inp_shexp.")


class GgufType(NamedTuple):
    """The types of ggml for experts and for other matrices, and the name of the mixture; norms and routers are F32."""

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
    name: str
    shape: tuple[int, ...]
    type: str
    read: Callable[[], Iterator[torch.Tensor]]  # its numbers, one piece after another, in memory that is used again


def export_gguf(
    opened: MoeModel, folder: Path, out: Path, type_: str, *, progress: Progress = lambda done, total: None
) -> None:
    """Write the model to the file `out` in one of `TYPES`, whole or not at all; `folder` has its tokenizer.

    Rows that are no whole number of a type's blocks are F16. Raises BadInput for a model that llama.cpp would not
    compute as it is, and without the package `gguf`; OutOfResources when the disk is full.
    """
    _check(opened)
    check_writable(out)
    import gguf

    config, kind = opened.model.config, TYPES[type_]
    architecture = WRITTEN[config.model_type]
    [known] = (each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    tensors = [*_others(opened, names.get_name, kind.others), *_experts(opened, kind.experts)]
    with replacing(out) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture)
        writer.add_file_type(gguf.LlamaFileType[kind.mixture])
        _add_config(writer, config)
        add_vocabulary(writer, folder, config.vocab_size)
        _write(writer, tensors, progress)


def _write(writer: "gguf.GGUFWriter", tensors: Sequence[_Tensor], progress: Progress) -> None:  # noqa: F821
    """Write the entries, then one tensor after another, of which only one is in memory."""
    from gguf import GGMLQuantizationType, quant_shape_to_byte_shape, quants

    for tensor in tensors:
        type_ = GGMLQuantizationType[tensor.type]
        shape = quant_shape_to_byte_shape(tensor.shape, type_)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), prod(shape), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for done, tensor in enumerate(tensors, 1):
        type_ = GGMLQuantizationType[tensor.type]
        encoded = b"".join(quants.quantize(piece.float().numpy(), type_).tobytes() for piece in tensor.read())
        writer.write_tensor_data(np.frombuffer(encoded, np.uint8))
        progress(done, len(tensors))
    writer.close()


def _check(opened: MoeModel) -> None:
    """Raise BadInput for a model that `export_gguf` does not write, and where `gguf` is not installed."""
    config = opened.model.config
    if config.model_type not in WRITTEN:
        raise BadInput(f"{config.model_type} is not written as GGUF: moectl writes {', '.join(WRITTEN)}")
    taken = ARCHITECTURES[WRITTEN[config.model_type]].fixed.get("norm_topk_prob", False)  # for granted
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
                f"this {config.model_type} has {what}, which llama.cpp would not follow: not written as GGUF"
            )
    if find_spec("gguf") is None:
        raise BadInput("GGUF files are written by the package gguf: pip install 'moectl[peers]'")


def _add_config(writer: "gguf.GGUFWriter", config: object) -> None:  # noqa: F821
    for theirs, ours in (ARCHITECTURES[writer.arch].fields | {_VALUE_LENGTH: "head_dim"}).items():
        value = getattr(config, ours, None)
        if value is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{writer.arch}.{theirs}", value)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _others(opened: MoeModel, name_of: Callable[[str], str], type_: str) -> Iterator[_Tensor]:
    """The parameters besides experts, the head too where it is the embedding: llama.cpp mostly wants both."""
    for name, parameter in opened.model.state_dict().items():
        if parameter.device.type != "meta":
            stem, _, ending = name.rpartition(".")
            found = f"{name_of(stem)}.{ending}"
            row = parameter[0] if "shared_expert_gate" in name else parameter  # of one output: a row in the files
            plain = row.dim() == 1 or any(part in found for part in _ROUTERS)
            yield _Tensor(found, tuple(row.shape), "F32" if plain else _fitting(type_, row.shape), partial(iter, [row]))


def _experts(opened: MoeModel, type_: str) -> Iterator[_Tensor]:
    for layer in opened.layers:
        block, count = _BLOCK.search(layer.name)[1], opened.shape.num_experts
        neurons = projections(layer)[GATE_UP][0] // 2
        for name, part, rows in (
            ("gate", GATE_UP, slice(neurons)),
            ("up", GATE_UP, slice(neurons, None)),
            ("down", DOWN, slice(None)),
        ):
            shape = (layer.hidden_size, neurons) if part == DOWN else (neurons, layer.hidden_size)
            read = partial(_rows, opened, layer, part, rows)
            yield _Tensor(f"blk.{block}.ffn_{name}_exps.weight", (count, *shape), _fitting(type_, shape), read)


def _fitting(type_: str, shape: Sequence[int]) -> str:
    return "F16" if shape[-1] % GGML_TYPES[type_].num_weights else type_


def _rows(opened: MoeModel, layer: MoeLayer, part: str, rows: slice) -> Iterator[torch.Tensor]:
    """These rows of a part of every expert of a layer, [1, rows, columns] each."""
    store = opened.store
    buffer = aligned(store.layout.nbytes)
    for expert in range(opened.shape.num_experts):
        store.read(layer.index, expert, buffer)
        yield store.layout.weights(buffer)[part][None, rows]
