"""Checkpoints with experts in few bits, in the layouts in which they are published, beside plain
ones of the same numbers."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tools.make import published
from tools.make.published import Encode, Tensors

Maker = Callable[[int, int, torch.Generator], Tensors]
"""Random tensors by role for a matrix [out, in]."""
Choose = Callable[[str, torch.Tensor], Maker | None]
"""What makes the tensors of a matrix, by its name and numbers; None where it is left as it is."""


def publish(
    plain: Path,
    out: Path,
    method: str,
    *,
    config: Mapping | None = None,
    choose: Choose | None = None,
) -> Path:
    """Write the checkpoint `plain` to `out` with matrices of experts and of attention in the format
    `method`, or those that are chosen, and their numbers into `plain`. The codes are random."""
    choose = choose or (
        lambda name, tensor: MAKERS[method] if _is_quantised(name, tensor, method) else None
    )
    generator = torch.Generator().manual_seed(0)

    def encode(name: str, tensor: torch.Tensor) -> Encode | None:
        make = choose(name, tensor)
        return make and (lambda matrix: make(*matrix.shape, generator))

    numbers = published.publish(plain, out, dict(config or CONFIGS[method]), encode)
    tensors = load_file(plain / "model.safetensors")
    save_file(tensors | numbers, plain / "model.safetensors", metadata={"format": "pt"})
    return out


def _is_quantised(name: str, tensor: torch.Tensor, method: str) -> bool:
    return (
        published.is_expert(name, tensor) or method != "mxfp4" and "self_attn.o_proj.weight" in name
    )


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
    rows: int,
    columns: int,
    generator: torch.Generator,
    *,
    bits: int = 4,
    group: int = 32,
    has_zeros: bool = False,
) -> Tensors:
    scale = _scales((rows, columns // group), generator).bfloat16()
    words = _words((rows, columns * bits // 32), generator)
    zeros = (
        {"zero_point": _words((rows * bits // 32, columns // group), generator)}
        if has_zeros
        else {}
    )
    return {"packed": words, "scale": scale, "size": torch.tensor([rows, columns]), **zeros}


def gptq(
    rows: int, columns: int, generator: torch.Generator, *, bits: int = 4, group: int = 32
) -> Tensors:
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
    return {
        "packed": _bytes((rows, columns // 2), generator),
        "scale": scale,
        "global": torch.tensor(0.1),
    }


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
