"""Write a checkpoint again with its experts in few bits, in a layout in which large models are
published.

    python -m tools.make.published MODEL OUT --format mxfp4

Weights are rounded to nearest: 8-bit floats in blocks of 128 x 128, 4-bit floats or signed integers
with a scale for 32 weights. All other tensors are copied. For models whose checkpoints have a
tensor for each matrix.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from artifacts.formats.codes import E2M1
from artifacts.formats.schemes import Spelling
from artifacts.formats.stated import stated_quantisation
from tools.arguments import parser_of

Tensors = dict[str, torch.Tensor]
Encode = Callable[[torch.Tensor], Tensors]
"""The tensors by role that hold a matrix [out, in] in few bits."""
Choose = Callable[[str, torch.Tensor], Encode | None]
"""What encodes the matrices of a stored tensor, by its name and numbers; None where it is left as
it is."""

_BLOCK = 128
_GROUP = 32
_INDEX = "model.safetensors.index.json"


def is_expert(name: str, tensor: torch.Tensor) -> bool:
    """Return whether a stored tensor has matrices of experts."""
    return ".experts." in name and "bias" not in name and tensor.dim() >= 2


def publish(model: Path, out: Path, quantization: Mapping, choose: Choose) -> Tensors:
    """Write the checkpoint `model` to `out` with chosen matrices as the config entry `quantization`
    says; return the numbers that these now stand for, by the names of their parameters."""
    stated = stated_quantisation({"quantization_config": quantization})
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors"))
    numbers: Tensors = {}
    files: dict[str, str] = {}
    for path in sorted(model.glob("*.safetensors")):
        stored: Tensors = {}
        for name, tensor in load_file(path).items():
            if encode := choose(name, tensor):
                spelling = stated.scheme_of(name.removesuffix(".weight")).spellings[0]
                numbers[name] = _encode(tensor, name, spelling, encode, stored)
            else:
                stored[name] = tensor
        save_file(stored, out / path.name, metadata={"format": "pt"})
        files |= dict.fromkeys(stored, path.name)
    _add(out / "config.json", {"quantization_config": quantization})
    if (out / _INDEX).exists():
        _add(out / _INDEX, {"weight_map": files})
    return numbers


def _encode(
    tensor: torch.Tensor, name: str, spelling: Spelling, encode: Encode, stored: Tensors
) -> torch.Tensor:
    """Put the tensors of a matrix [out, in], or of the matrices of all experts, into `stored`;
    return its numbers."""
    stem = name.removesuffix(".weight") if spelling.is_module else name
    if tensor.dim() == 2:
        roles = encode(tensor)
        numbers = spelling.format.dequantise(roles)
    else:
        is_turned = "blocks" in spelling.roles  # gpt-oss has [E, in, out] in the model
        each = [encode(matrix.T if is_turned else matrix) for matrix in tensor]
        roles = {role: torch.stack([of[role] for of in each]) for role in each[0]}
        numbers = torch.stack([spelling.format.dequantise(of) for of in each])
        numbers = numbers.transpose(1, 2) if is_turned else numbers
    stored |= {stem + spelling.roles[role]: value.contiguous() for role, value in roles.items()}
    return numbers.to(tensor.dtype).contiguous()


def _add(path: Path, entries: Mapping) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def fp8(matrix: torch.Tensor) -> Tensors:
    """Encode as 8-bit floats; the largest number of a block becomes the largest of the type."""
    rows, columns = (-(-size // _BLOCK) for size in matrix.shape)
    padded = torch.zeros(rows * _BLOCK, columns * _BLOCK)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    blocks = padded.view(rows, _BLOCK, columns, _BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    codes = (blocks / scale[:, None, :, None]).view_as(padded)[: matrix.shape[0], : matrix.shape[1]]
    return {"weight": codes.to(torch.float8_e4m3fn), "scale": scale}


def mxfp4(matrix: torch.Tensor) -> Tensors:
    """Encode as 4-bit floats. The exponent of a group is the exponent of its largest number, less
    the exponent of the type's largest (OCP Microscaling 1.0, section 6.3)."""
    groups = matrix.float().unflatten(1, (-1, _GROUP))
    exponent = groups.abs().amax(dim=2).clamp(min=2.0**-100).log2().floor() - 2
    values = torch.tensor(E2M1[:8])
    magnitude = (groups.abs() / exponent.exp2()[:, :, None]).clamp(max=values[-1])
    codes = (
        torch.bucketize(magnitude, (values[1:] + values[:-1]) / 2).to(torch.uint8)
        | (groups < 0).to(torch.uint8) << 3
    )
    codes = codes.flatten(1)
    return {
        "blocks": codes[:, ::2] | codes[:, 1::2] << 4,
        "scales": (exponent + 127).to(torch.uint8),
    }


def int4(matrix: torch.Tensor) -> Tensors:
    """Encode as signed integers of 4 bits, eight in a word; the largest number of a group is 7.5
    scales."""
    groups = matrix.float().unflatten(1, (-1, _GROUP))
    scale = (groups.abs().amax(dim=2).clamp(min=1e-12) / 7.5).bfloat16()
    codes = (groups / scale.float()[:, :, None]).round().clamp(-8, 7).int() + 8
    eight = codes.flatten(1).unflatten(1, (-1, 8)).long() << torch.arange(0, 32, 4)
    words = eight.sum(dim=2)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return {"packed": packed, "scale": scale, "size": torch.tensor(matrix.shape)}


def _compressed(format: str, weights: Mapping) -> Mapping:
    group = {"weights": weights, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
    }


_FOUR_BITS = {"num_bits": 4, "group_size": _GROUP, "symmetric": True}
FORMATS: dict[str, tuple[Mapping, Encode]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}, fp8),
    "mxfp4": (_compressed("mxfp4-pack-quantized", _FOUR_BITS | {"type": "float"}), mxfp4),
    "int4": (_compressed("pack-quantized", _FOUR_BITS | {"type": "int"}), int4),
}


def experts_in(format: str) -> tuple[Mapping, Choose]:
    """The config entry of a format, and the choice of experts alone."""
    quantization, encode = FORMATS[format]
    return quantization, lambda name, tensor: encode if is_expert(name, tensor) else None


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("out", type=Path, help="folder to write to, which must not exist")
    parser.add_argument("--format", choices=FORMATS, default="mxfp4")
    options = parser.parse_args()
    publish(options.model, options.out, *experts_in(options.format))


if __name__ == "__main__":
    main()
