"""Checkpoints with experts in few bits, in the layouts in which they are published, beside plain ones of the same
numbers."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from artifacts.formats.stated import stated_quantisation
from artifacts.formats.table import Spelling, spellings_of

Tensors = dict[str, torch.Tensor]
Maker = Callable[[int, int, torch.Generator], Tensors]
"""Random tensors by role for a matrix [out, in]."""
Choose = Callable[[str, torch.Tensor], Maker | None]
"""What makes the tensors of a matrix, by its name and numbers; None where it is left as it is."""


def publish(
    plain: Path, out: Path, method: str, *, config: Mapping | None = None, choose: Choose | None = None
) -> Path:
    """Write the checkpoint `plain` to `out` with matrices of experts and of attention in the format `method`, or those
    that are chosen, and their numbers into `plain`. The codes are random."""
    quantization = dict(config or CONFIGS[method])
    stated = stated_quantisation({"quantization_config": quantization})
    choose = choose or (lambda name, tensor: MAKERS[method] if _is_quantised(name, tensor, method) else None)
    generator = torch.Generator().manual_seed(0)
    numbers, stored = {}, {}
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        if (make := choose(name, tensor)) is None:
            stored[name] = tensor
            continue
        spelling = spellings_of(stated.scheme_of(name.removesuffix(".weight")))[0]
        numbers[name] = _into(tensor, name, spelling, make, generator, stored)
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
    else:  # gpt-oss: [E, in, out] in the model
        each = [make(tensor.shape[2], tensor.shape[1], generator) for _ in range(len(tensor))]
        roles = {role: torch.stack([of[role] for of in each]) for role in each[0]}
        numbers = torch.stack([spelling.format.dequantise(of).T for of in each])
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


def fp8(rows: int, columns: int, generator: torch.Generator, *, block: int = 16) -> Tensors:
    """In blocks, or with one scale a row where a block is of no size."""
    grid = (-(-rows // block), -(-columns // block)) if block else (rows, 1)
    return {"weight": _floats((rows, columns), generator), "scale": _scales(grid, generator, 0.2)}


def _mxfp4(rows: int, columns: int, generator: torch.Generator) -> Tensors:
    scales = torch.randint(120, 126, (rows, columns // 32), generator=generator, dtype=torch.uint8)
    return {"blocks": _bytes((rows, columns // 32, 16), generator), "scales": scales}


def packed(
    rows: int, columns: int, generator: torch.Generator, *, bits: int = 4, group: int = 32, has_zeros: bool = False
) -> Tensors:
    scale = _scales((rows, columns // group), generator).bfloat16()
    words = _words((rows, columns * bits // 32), generator)
    zeros = {"zero_point": _words((rows * bits // 32, columns // group), generator)} if has_zeros else {}
    return {"packed": words, "scale": scale, "size": torch.tensor([rows, columns]), **zeros}


def gptq(rows: int, columns: int, generator: torch.Generator, *, bits: int = 4, group: int = 32) -> Tensors:
    return {
        "qweight": _words((columns * bits // 32, rows), generator),
        "qzeros": _words((columns // group, rows * bits // 32), generator),
        "scales": _scales((columns // group, rows), generator).half(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // group,
    }


def awq(rows: int, columns: int, generator: torch.Generator, *, group: int = 32) -> Tensors:
    return {
        "qweight": _words((columns, rows // 8), generator),
        "qzeros": _words((columns // group, rows // 8), generator),
        "scales": _scales((columns // group, rows), generator).half(),
    }


def _nvfp4(rows: int, columns: int, generator: torch.Generator) -> Tensors:
    scale = (1 + torch.rand((rows, columns // 16), generator=generator)).to(torch.float8_e4m3fn)
    return {"packed": _bytes((rows, columns // 2), generator), "scale": scale, "global": torch.tensor(0.1)}


MAKERS: dict[str, Maker] = {
    "fp8": fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": packed,
    "gptq": gptq,
    "awq": awq,
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
