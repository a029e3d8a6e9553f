"""Checkpoints with experts in few bits, in the layouts in which they are published, beside plain ones of the same
numbers."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from artifacts.formats.table import Spelling, quantisation_of

Tensors = dict[str, torch.Tensor]
Maker = Callable[[int, int, torch.Generator], Tensors]
"""Random tensors by role for a matrix [out, in]."""


def publish(plain: Path, out: Path, method: str, *, config: Mapping | None = None) -> Path:
    """Write the checkpoint `plain` to `out` with matrices of experts and of attention in the format `method`, and their
    numbers into `plain`. The codes are random."""
    quantization = dict(config or CONFIGS[method])
    spelling = quantisation_of({"quantization_config": quantization}).spellings[0]
    generator = torch.Generator().manual_seed(0)
    numbers, stored = {}, {}
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        if not _is_quantised(name, tensor, method):
            stored[name] = tensor
            continue
        numbers[name] = _into(tensor, name, spelling, MAKERS[method], generator, stored)
    shutil.copytree(plain, out)
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors | numbers, plain / "model.safetensors", metadata={"format": "pt"})
    _add_config(out, quantization)
    return out


def _into(
    tensor: torch.Tensor, name: str, spelling: Spelling, make: Maker, generator: torch.Generator, stored: Tensors
) -> torch.Tensor:
    """Put random tensors of a matrix into `stored`; return its numbers."""
    stem = name.removesuffix(".weight") if spelling.is_module else name
    if tensor.dim() == 2:
        roles = make(*tensor.shape, generator)
        numbers = spelling.format.dequantise(roles)
    else:
        is_turned = "blocks" in spelling.roles  # gpt-oss has [E, in, out] in the model
        shape = tensor.shape[:0:-1] if is_turned else tensor.shape[1:]
        each = [make(*shape, generator) for _ in range(len(tensor))]
        roles = {role: torch.stack([of[role] for of in each]) for role in each[0]}
        numbers = torch.stack([spelling.format.dequantise(of) for of in each])
        numbers = numbers.transpose(1, 2) if is_turned else numbers
    stored |= {stem + spelling.roles[role]: value.contiguous() for role, value in roles.items()}
    return numbers.to(tensor.dtype).contiguous()


def _is_quantised(name: str, tensor: torch.Tensor, method: str) -> bool:
    is_expert = ".experts." in name and "bias" not in name and tensor.dim() >= 2
    return is_expert or method != "mxfp4" and "self_attn.o_proj.weight" in name


def _add_config(folder: Path, quantization: Mapping) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))


# Random tensors


def _bytes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def _words(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)


def _scales(shape: tuple[int, ...], generator: torch.Generator, size: float = 0.05) -> torch.Tensor:
    return (0.5 + torch.rand(shape, generator=generator)) * size


def _floats(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)


def _fp8(rows: int, columns: int, generator: torch.Generator) -> Tensors:
    scale = _scales((-(-rows // 16), -(-columns // 16)), generator, 0.2)
    return {"weight": _floats((rows, columns), generator), "scale": scale}


def _mxfp4(rows: int, columns: int, generator: torch.Generator) -> Tensors:
    scales = torch.randint(120, 126, (rows, columns // 32), generator=generator, dtype=torch.uint8)
    return {"blocks": _bytes((rows, columns // 32, 16), generator), "scales": scales}


def _packed(rows: int, columns: int, generator: torch.Generator) -> Tensors:
    scale = _scales((rows, columns // 32), generator).bfloat16()
    return {"packed": _words((rows, columns // 8), generator), "scale": scale, "size": torch.tensor([rows, columns])}


def _gptq(rows: int, columns: int, generator: torch.Generator) -> Tensors:
    return {
        "qweight": _words((columns // 8, rows), generator),
        "qzeros": _words((columns // 32, rows // 8), generator),
        "scales": _scales((columns // 32, rows), generator).half(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // 32,
    }


def _awq(rows: int, columns: int, generator: torch.Generator) -> Tensors:
    return {
        "qweight": _words((columns, rows // 8), generator),
        "qzeros": _words((columns // 32, rows // 8), generator),
        "scales": _scales((columns // 32, rows), generator).half(),
    }


def _nvfp4(rows: int, columns: int, generator: torch.Generator) -> Tensors:
    scale = (1 + torch.rand((rows, columns // 16), generator=generator)).to(torch.float8_e4m3fn)
    return {"packed": _bytes((rows, columns // 2), generator), "scale": scale, "global": torch.tensor(0.1)}


MAKERS: dict[str, Maker] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _packed,
    "gptq": _gptq,
    "awq": _awq,
    "nvfp4": _nvfp4,
}
_INT4 = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}
CONFIGS: dict[str, Mapping] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [16, 16]},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": _INT4, "targets": ["Linear"]}},
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
