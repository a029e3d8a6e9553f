"""Writes a whole checkpoint with its experts at 2, 3, 4 or 8 bits, in the common GPTQ layout
(version 2)."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

from artifacts.common.files import check_writable, replacing
from artifacts.errors import BadInput
from artifacts.quantisation.gptq import Quantized
from artifacts.quantisation.gptq_checkpoint import gptq_tensors, quantize_config
from artifacts.quantisation.packing import Packed
from artifacts.quantisation.replica_file import Parts, read_metadata
from artifacts.store.runs import versions
from profilers.quantise.method import first_projection, projections
from runtime.model.files.checkpoint import Checkpoint
from runtime.model.files.expert_store import Extent
from runtime.model.files.expert_tensors import locate_experts
from runtime.model.files.locate import other_files
from runtime.model.layers import MoeLayer
from runtime.model.layout import ExpertLayout
from runtime.model.open import MoeModel

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Slice:
    """Rows of a projection's part that are a module of their own in a published checkpoint."""

    module: str
    part: str
    rows: slice


def export_gptq(
    opened: MoeModel,
    checkpoint: Checkpoint,
    read: Callable[[int, int], Parts],
    out: Path,
    *,
    first_file: Path,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write `out`, a new folder, whole or not at all. `read(layer, expert)` returns replicas of one
    width.

    `first_file` is any of their files; its metadata says how they were made. Raises BadInput when
    GPTQ readers cannot take the sizes, the folder exists or the checkpoint changes, OutOfResources
    when the disk is full.
    """
    if not opened.store.layout.is_plain:
        raise BadInput(
            "the checkpoint has its experts in few bits already: export from the checkpoint it "
            "was made of"
        )
    shape = opened.shape
    layout = opened.store.layout
    located = locate_experts(
        opened.model, opened.layers, shape=shape, layout=layout, tensors=checkpoint.tensors
    )
    names = {
        (tensor.shard.path, tensor.offset, tensor.nbytes): name
        for name, tensor in checkpoint.tensors.items()
    }
    weight_map: dict[str, str] = {}
    groups: dict[str, int] = {}
    with _new_folder(out) as folder:
        for layer in opened.layers:
            tensors = {}
            for expert in range(shape.num_experts):
                pieces = located.extents[layer.index * shape.num_experts + expert]
                stored = [
                    (piece, names.get((piece.shard.path, piece.offset, piece.nbytes), ""))
                    for piece in pieces
                ]
                parts = read(layer.index, expert)
                for slice_ in _slices(layer, expert, stored, layout):
                    tensors |= _module(slice_, parts)
                    groups[slice_.module] = parts[slice_.part].group_size
                bits = next(part.bits for part in parts.values() if isinstance(part, Packed))
            weight_map |= _write(folder, f"model-experts-{layer.index:03}.safetensors", tensors)
            progress(layer.index + 1, shape.num_layers)
        others = {name: tensor.read() for name, tensor in located.others.items()}
        weight_map |= _write(folder, "model-others.safetensors", others)
        config = _config(bits, groups, others, read_metadata(first_file))
        _write_texts(checkpoint.folder, folder, config, weight_map)
        checkpoint.check_unchanged()


def _slices(
    layer: MoeLayer, expert: int, stored: list[tuple[Extent, str]], layout: ExpertLayout
) -> list[_Slice]:
    """Return the modules of one expert, by their names in this checkpoint, or by the usual names
    where it is fused."""
    if all(name.endswith(".weight") for _, name in stored):
        return _as_stored(layout, stored)
    module = layer.experts
    base = f"{layer.name}.{expert}"
    first = first_projection(module)
    whole = slice(None)
    half = projections(layer)[first][0] // 2
    down = _Slice(f"{base}.down_proj", "down_proj", whole)
    if not module.has_gate:
        return [_Slice(f"{base}.up_proj", first, whole), down]
    gate, up = (
        (slice(half), slice(half, None))
        if module.is_concatenated
        else (slice(0, None, 2), slice(1, None, 2))
    )
    return [_Slice(f"{base}.gate_proj", first, gate), _Slice(f"{base}.up_proj", first, up), down]


def _as_stored(layout: ExpertLayout, stored: list[tuple[Extent, str]]) -> list[_Slice]:
    """Return the rows of a part that each stored tensor fills, from its place in the expert's
    slot."""
    slices = []
    for piece, name in stored:
        part = next(
            part for part in layout.parts if part.offset <= piece.start < part.offset + part.nbytes
        )
        row_nbytes = part.nbytes // part.shape[0]
        start, stop = ((at - part.offset) // row_nbytes for at in (piece.start, piece.stop))
        slices.append(_Slice(name.removesuffix(".weight"), part.name, slice(start, stop)))
    return slices


def _module(slice_: _Slice, parts: Parts) -> dict[str, torch.Tensor]:
    """Return the tensors of one module, by their names in the checkpoint."""
    whole = Quantized.from_packed(parts[slice_.part])
    rows = slice_.rows
    module = Quantized(
        whole.bits, whole.group_size, whole.codes[rows], whole.scales[rows], whole.zeros[rows]
    )
    tensors = gptq_tensors(module.packed())
    bias = parts.get(f"{slice_.part}_bias")
    if bias is not None:
        tensors["bias"] = bias[rows]
    return {f"{slice_.module}.{name}": tensor for name, tensor in tensors.items()}


def _config(
    bits: int, groups: Mapping[str, int], others: Mapping[str, torch.Tensor], made: Mapping
) -> dict:
    """Return the quantisation config. Modules whose names differ only in numbers share an entry, by
    a pattern."""
    usual = max(groups.values())
    dynamic = {
        f"+:{_pattern(name)}": {"group_size": size}
        for name, size in groups.items()
        if size != usual
    }
    matrices = [
        name.removesuffix(".weight") for name, tensor in others.items() if name.endswith(".weight")
    ]
    dynamic |= {
        f"-:{_pattern(name)}": {} for name in matrices if others[f"{name}.weight"].dim() == 2
    }
    meta = {
        "quantizer": [f"moectl:{versions().get('moectl', 'not installed')}"],
        "recipe": made["recipe"],
    }
    return quantize_config(bits, usual, damp=float(made["damp"]), dynamic=dynamic, meta=meta)


def _pattern(name: str) -> str:
    """Replace numbers by a pattern: `layers.3.mlp` -> `layers\\.\\d+\\.mlp`."""
    return r"\.".join(r"\d+" if word.isdecimal() else word for word in name.split("."))


def _write(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Write one shard and return its entries of the index."""
    with replacing(folder / name) as temporary:
        temporary.write_bytes(
            save({key: tensor.contiguous() for key, tensor in tensors.items()}, {"format": "pt"})
        )
    return dict.fromkeys(tensors, name)


def _write_texts(source: Path, folder: Path, config: dict, weight_map: Mapping[str, str]) -> None:
    """Write the index and the configs, and copy the other files beside the checkpoint's weights."""
    for path in other_files(source):
        if path.name != "config.json":
            shutil.copyfile(path, folder / path.name)
    whole = json.loads((source / "config.json").read_bytes()) | {"quantization_config": config}
    texts = {
        "config.json": whole,
        "quantize_config.json": config,
        "model.safetensors.index.json": {
            "metadata": {},
            "weight_map": dict(sorted(weight_map.items())),
        },
    }
    for name, value in texts.items():
        with replacing(folder / name) as temporary:
            temporary.write_text(json.dumps(value, indent=2) + "\n")


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Lend a folder beside `out` that is renamed to it on success and removed on failure."""
    if out.exists():
        raise BadInput(f"{out} is there already: name a new folder")
    check_writable(out)
    folder = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
