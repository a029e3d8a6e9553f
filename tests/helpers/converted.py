"""The small GGUF files that llama.cpp's converter wrote, and versions of them in few bits."""

import lzma
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

DATA = Path(__file__).parents[1] / "data" / "gguf"
NAMES = sorted(path.name.removesuffix(".gguf.xz") for path in DATA.iterdir())


def unpacked(name: str, folder: Path) -> Path:
    """Write the file of an architecture to a folder, all of its numbers in float32."""
    path = folder / f"{name}.gguf"
    path.write_bytes(lzma.decompress((DATA / f"{path.name}.xz").read_bytes()))
    return path


def in_few_bits(path: Path, types: Sequence[str]) -> tuple[Path, Path]:
    """Write a file again with its matrices in these types by turns, a layer's gate and up alike,
    and once more with what they hold in float32. Returns both paths."""
    reader = gguf.GGUFReader(path)
    paths = tuple(path.with_stem(f"{path.stem}-{ending}") for ending in ("packed", "plain"))
    for out in paths:
        _rewrite(reader, out, types, is_packed=out == paths[0])
    return paths


def _rewrite(reader: gguf.GGUFReader, out: Path, types: Sequence[str], *, is_packed: bool) -> None:
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kinds = [gguf.GGUFValueType(kind) for kind in field.types]
            writer.add_key_value(field.name, field.contents(), *kinds[:2])
    turns = {}
    for tensor in reader.tensors:
        array = np.array(tensor.data)
        group = tensor.name.replace("ffn_up", "ffn_gate")
        if array.ndim == 1 or tensor.tensor_type != Type.F32 or not _is_packed(tensor.name):
            writer.add_tensor(tensor.name, array, raw_dtype=tensor.tensor_type)
            continue
        turn = turns.setdefault(group, types[len(turns) % len(types)])
        size, _ = gguf.GGML_QUANT_SIZES[Type[turn]]
        if array.shape[-1] % size:
            writer.add_tensor(tensor.name, array)
            continue
        packed = gguf.quants.quantize(array, Type[turn])
        if is_packed:
            writer.add_tensor(tensor.name, packed, raw_dtype=Type[turn])
        else:
            writer.add_tensor(tensor.name, gguf.quants.dequantize(packed, Type[turn]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _is_packed(name: str) -> bool:
    """Return whether llama.cpp's quantize packs a tensor, as it does weights but not routers."""
    return name.endswith(".weight") and "ffn_gate_inp" not in name and "ssm_conv1d" not in name
