"""Reads what `moectl export` writes back into packed experts, and GPTQ checkpoints like it.

A run opens such checkpoints by `artifacts.formats.integers.gptq`, in whatever layout they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from artifacts.common.untrusted import read_json
from artifacts.errors import BadInput
from artifacts.quantisation.gptq_checkpoint import V2, WIDTHS
from artifacts.quantisation.packing import Packed, pack, packed_shapes, unpack
from artifacts.quantisation.widths import listed

V1 = "gptq"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_CONFIG = "quantize_config.json"


@dataclass(frozen=True, slots=True)
class GptqCheckpoint:
    """An open GPTQ checkpoint; `files` maps each tensor to its file. Tensors are read only when
    they are asked for."""

    folder: Path
    config: Mapping[str, object]
    files: Mapping[str, Path]

    @classmethod
    def open(cls, folder: Path) -> "GptqCheckpoint":
        """Open a folder. Raises BadInput where it is no GPTQ checkpoint, has other widths, or lost
        its zero-points."""
        config = _read_config(folder)
        _check_config(config, folder)
        return cls(folder, config, _files(folder))

    def modules(self) -> list[str]:
        """Names of all quantised modules."""
        return [name.removesuffix(".qweight") for name in self.files if name.endswith(".qweight")]

    def read(self, name: str) -> Packed:
        """Read one module. Raises BadInput when its tensors are missing or do not fit each
        other."""
        parts = {
            part: self._tensor(f"{name}.{part}")
            for part in ("qweight", "qzeros", "scales", "g_idx")
        }
        dims = [parts[part].dim() for part in ("qweight", "qzeros", "scales", "g_idx")]
        if dims != [2, 2, 2, 1] or any(tensor.numel() == 0 for tensor in parts.values()):
            raise BadInput(
                f"{self.folder}: {name} has tensors of {dims} dimensions, some of them empty"
            )
        bits = int(self.config["bits"])
        num_inputs = len(parts["g_idx"])
        num_groups, num_outputs = parts["scales"].shape
        group_size = num_inputs // num_groups or 1
        shapes = {
            part: (parts[part].dtype, tuple(parts[part].shape))
            for part in ("qweight", "qzeros", "scales")
        }
        if shapes != packed_shapes(num_outputs, num_inputs, bits, group_size):
            raise BadInput(
                f"{self.folder}: {name} has tensors {shapes}, which do not fit {bits} bits"
            )
        if not torch.equal(parts["g_idx"].long(), torch.arange(num_inputs) // group_size):
            raise BadInput(
                f"{self.folder}: {name} has its inputs in another order (desc_act), which moectl "
                "does not read"
            )
        zeros = (
            parts["qzeros"]
            if _format(self.config) == V2
            else _plus_one(parts["qzeros"], bits, num_outputs)
        )
        return Packed(bits, group_size, num_inputs, parts["qweight"], parts["scales"], zeros)

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self.files:
            raise BadInput(f"{self.folder} has no {name}: the checkpoint is incomplete")
        with safe_open(self.files[name], framework="pt") as file:
            return file.get_tensor(name).clone()


def _read_config(folder: Path) -> dict[str, object]:
    for name, key in ((_CONFIG, None), ("config.json", "quantization_config")):
        path = folder / name
        if not path.is_file():
            continue
        try:
            config = read_json(path)
        except (OSError, ValueError) as error:
            raise BadInput(f"{path} is not JSON ({error}): download it again") from error
        fields = config.get(key) if key is not None and isinstance(config, dict) else config
        if isinstance(fields, dict):
            return fields
    raise BadInput(f"{folder} has no {_CONFIG}: it is no GPTQ checkpoint")


def _check_config(config: Mapping[str, object], folder: Path) -> None:
    method = config.get("quant_method", "gptq")
    layout = _format(config)
    if method != "gptq" or layout not in (V1, V2):
        raise BadInput(
            f"{folder} is {method} in the layout {layout}: moectl reads gptq in {V2}, and {V1} if "
            "symmetric"
        )
    if config.get("bits") not in WIDTHS:
        raise BadInput(
            f"{folder} has {config.get('bits')} bits: moectl reads GPTQ checkpoints of "
            f"{listed(WIDTHS, last=' and ')}"
        )
    if layout == V1 and not config.get("sym"):
        raise BadInput(
            f"{folder} has the first GPTQ layout and is asymmetric: it stores zero-points minus "
            "one, and a zero-point of 0 overwrote its neighbours, so that they are lost; make it "
            f"again as {V2} (or symmetric)"
        )


def _format(config: Mapping[str, object]) -> object:
    return config.get("checkpoint_format", config.get("format", V1))


def _files(folder: Path) -> dict[str, Path]:
    paths = [folder / _SINGLE]
    if (folder / _INDEX).is_file():
        paths = [folder / name for name in _indexed(folder / _INDEX)]
    files = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError, ValueError) as error:
            raise BadInput(
                f"{path} is missing or no safetensors file ({error}): download it again"
            ) from error
    return files


def _indexed(index: Path) -> list[str]:
    try:
        names = set(read_json(index)["weight_map"].values())
        if not all(Path(name).name == name for name in names):
            raise ValueError("it points outside its folder")
        return sorted(names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(
            f"{index} is not an index of safetensors shards ({error}): download it again"
        ) from error


def _plus_one(qzeros: torch.Tensor, bits: int, num_outputs: int) -> torch.Tensor:
    """Restore the zero-points of the first layout. None is at its maximum: a symmetric checkpoint
    has none there."""
    zeros = unpack(qzeros.numpy().T, bits, num_outputs) + np.uint8(1)
    return torch.from_numpy(pack(zeros & np.uint8(2**bits - 1), bits)).T.contiguous()
