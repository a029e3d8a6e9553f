"""Random matrices of every published format, for the checks of `tools.gpu.check`: types, shapes and
contents."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from artifacts.formats.base import Format, Stored
from artifacts.formats.fp8 import Scaled
from artifacts.formats.gguf.ggml import GGML, GgmlBlocks
from artifacts.formats.integers.awq import Awq
from artifacts.formats.integers.gptq import Gptq
from artifacts.formats.integers.order import ORDER
from artifacts.formats.integers.packed_integers import PackedIntegers
from artifacts.formats.mxfp4 import MxFp4
from artifacts.formats.nvfp4 import NvFp4
from runtime.kernels.gpu.addressing import BLOCKS

GROUP = 128  # inputs with one scale, but where a format says how many
_E4M3 = torch.float8_e4m3fn
_E5M2 = torch.float8_e5m2
_E8M0 = torch.float8_e8m0fnu

Roles = dict[str, Stored]


def _fp8(
    dtype: torch.dtype, block: tuple[int, int], scale: torch.dtype, rows: int, columns: int
) -> Roles:
    grid = tuple(-(-size // each) for size, each in zip((rows, columns), block, strict=True))
    return {"weight": Stored(dtype, (rows, columns)), "scale": Stored(scale, grid)}


def _mxfp4(rows: int, columns: int) -> Roles:
    blocks = Stored(torch.uint8, (rows, columns // 32, 16))
    return {"blocks": blocks, "scales": Stored(torch.uint8, (rows, columns // 32))}


def _nvfp4(rows: int, columns: int) -> Roles:
    scale = Stored(_E4M3, (rows, columns // 16))
    return {
        "packed": Stored(torch.uint8, (rows, columns // 2)),
        "scale": scale,
        "global": Stored(torch.float32, (1,)),
    }


def _packed(bits: int, optional: tuple[str, ...], rows: int, columns: int) -> Roles:
    groups = columns // GROUP
    found = {"packed": Stored(torch.int32, (rows, columns * bits // 32))}
    found["scale"] = Stored(torch.bfloat16, (rows, groups))
    others = {"zero_point": (-(-rows * bits // 32), groups), "g_idx": (columns,)}
    return found | {role: Stored(torch.int32, others[role]) for role in optional}


def _gptq(bits: int, optional: tuple[str, ...], rows: int, columns: int) -> Roles:
    groups = columns // GROUP
    found = {"qweight": Stored(torch.int32, (columns * bits // 32, rows))}
    found["qzeros"] = Stored(torch.int32, (groups, rows * bits // 32))
    found["scales"] = Stored(torch.float16, (groups, rows))
    return found | {role: Stored(torch.int32, (columns,)) for role in optional}


def _awq(rows: int, columns: int) -> Roles:
    words, zeros = ((count, rows // 8) for count in (columns, columns // GROUP))
    found = {"qweight": Stored(torch.int32, words), "qzeros": Stored(torch.int32, zeros)}
    return found | {"scales": Stored(torch.float16, (columns // GROUP, rows))}


def _ggml(form: GgmlBlocks, rows: int, columns: int) -> Roles:
    row_nbytes = columns // form.num_weights * form.nbytes
    return {"blocks": Stored(torch.uint8, (rows, row_nbytes))}


class Case(NamedTuple):
    """A format, and types and shapes of its tensors by role for a matrix [out, in]."""

    format: Format
    roles: Callable[[int, int], Roles]


_ROW = (1, 1 << 30)
_MATRIX = (1 << 30, 1 << 30)
CASES: Mapping[str, Case] = {
    "fp8 in blocks": Case(Scaled(), partial(_fp8, _E4M3, (128, 128), torch.float32)),
    "fp8 in blocks, powers of two": Case(Scaled(), partial(_fp8, _E4M3, (128, 128), _E8M0)),
    "fp8 by row, e5m2": Case(Scaled(), partial(_fp8, _E5M2, _ROW, torch.bfloat16)),
    "fp8, one scale": Case(Scaled(), partial(_fp8, _E4M3, _MATRIX, torch.float32)),
    "integers of 8 bits": Case(Scaled(), partial(_fp8, torch.int8, _ROW, torch.float32)),
    "mxfp4": Case(MxFp4(), _mxfp4),
    "nvfp4": Case(NvFp4(), _nvfp4),
    "nvfp4, inverse": Case(NvFp4(is_inverse=True), _nvfp4),
    "packed, 4 bits": Case(PackedIntegers(), partial(_packed, 4, ())),
    "packed, 4 bits, in any order": Case(
        PackedIntegers(), partial(_packed, 4, ("zero_point", "g_idx"))
    ),
    "packed, 8 bits": Case(PackedIntegers(bits=8), partial(_packed, 8, ("zero_point",))),
    "gptq, 4 bits": Case(Gptq(), partial(_gptq, 4, ())),
    "gptq, 4 bits, in any order": Case(Gptq(is_permuted=True), partial(_gptq, 4, ("g_idx",))),
    "gptq_v2, 3 bits": Case(Gptq(bits=3, zero_offset=0), partial(_gptq, 3, ("g_idx",))),
    "gptq, 2 bits": Case(Gptq(bits=2), partial(_gptq, 2, ())),
    "gptq, 8 bits": Case(Gptq(bits=8), partial(_gptq, 8, ())),
    "awq": Case(Awq(), _awq),
    **{name: Case(GGML[name], partial(_ggml, GGML[name])) for name in BLOCKS},
}


def random_content(
    role: str, like: torch.Tensor, num_groups: int, generator: torch.Generator
) -> torch.Tensor:
    """Random codes, and scales that give weights of some hundredths."""
    own = {"generator": generator, "device": like.device}
    if role == ORDER:
        return torch.randint(0, num_groups, like.shape, **own)
    if role == "scales" and like.dtype is torch.uint8 or like.dtype is _E8M0:
        return torch.randint(117, 122, like.shape, dtype=torch.uint8, **own).view(like.dtype)
    if like.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return (0.5 + torch.rand(like.shape, **own)) * 0.005
    codes = torch.randint(0, 256, (like.nbytes,), dtype=torch.uint8, **own)
    if like.dtype in (_E4M3, _E5M2):
        codes[(codes & 0x7F) >= 0x7C] = 0  # NaN and infinity, and a few of the largest numbers
    return codes.view(like.dtype).view(like.shape)
