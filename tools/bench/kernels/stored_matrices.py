"""Random matrices in the published formats and their variants, and experts of them as they lie in a
slot."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from artifacts.formats import base
from artifacts.formats.base import Format
from artifacts.formats.fp8 import Scaled
from artifacts.formats.gguf.ggml import GGML, GgmlBlocks
from artifacts.formats.integers.awq import Awq
from artifacts.formats.integers.gptq import Gptq
from artifacts.formats.integers.packed_integers import PackedIntegers
from artifacts.formats.mxfp4 import MxFp4
from artifacts.formats.nvfp4 import NvFp4
from runtime.backends.cpu.forms_published import MULTIPLIED
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.layout import ExpertLayout, Layout, aligned, stored_part
from runtime.tiers.replica_layouts import ReplicaLayout

Tensors = dict[str, torch.Tensor]


class Stored(NamedTuple):
    """A format, and a maker of random tensors by role for a matrix [rows, columns]."""

    format: Format
    make: Callable[[int, int], Tensors]


def plain_expert(
    hidden: int, neurons: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[ExpertLayout, torch.Tensor]:
    """An expert of random weights that are not quantised: its layout and its bytes."""
    layout = ExpertLayout.of({GATE_UP: (2 * neurons, hidden), DOWN: (hidden, neurons)}, dtype)
    content = aligned(layout.nbytes)
    for part in layout.views(content).values():
        part.normal_(std=0.02)
    return layout, content


def cold_copies(
    layout: Layout | ReplicaLayout, content: torch.Tensor, least_nbytes: int
) -> torch.Tensor:
    """Copies of an expert [n, bytes] that together have at least so many bytes: more than a cache
    holds."""
    count = -(-least_nbytes // layout.nbytes)
    copies = aligned(count * layout.nbytes).view(-1, layout.nbytes)
    copies[:] = content[: layout.nbytes]
    return copies


def random_expert(
    stored: Stored, hidden: int, neurons: int, dtype: torch.dtype
) -> tuple[ExpertLayout, torch.Tensor]:
    """An expert of random matrices gate, up and down: its layout and its bytes, as in a slot."""
    layout, content = stored_expert(stored, hidden, neurons, dtype)
    assert layout.arrange(content) is None, f"{layout.format} with an index beyond its groups"
    return layout, content


def stored_expert(
    stored: Stored, hidden: int, neurons: int, dtype: torch.dtype
) -> tuple[ExpertLayout, torch.Tensor]:
    """The same with its bytes in the order in which a checkpoint has them."""
    shapes = (
        (GATE_UP, 0, neurons, hidden),
        (GATE_UP, 1, neurons, hidden),
        (DOWN, 0, hidden, neurons),
    )
    tensors = {
        stored_part(
            part, source, role, stored.format, base.Stored(tensor.dtype, tuple(tensor.shape))
        ): tensor
        for part, source, rows, columns in shapes
        for role, tensor in stored.make(rows, columns).items()
    }
    layout = ExpertLayout.stored(tensors, dtype)
    content = aligned(layout.nbytes)
    for part, tensor in zip(layout.parts, tensors.values(), strict=True):
        part.bytes_of(content).copy_(tensor.contiguous().view(-1).view(torch.uint8))
    return layout, content


def variants(group: int) -> Mapping[str, Stored]:
    """Return every format by name; formats with groups of any size have groups of `group`
    inputs."""
    blocks = Scaled(block=(group, group))
    eight_bit = {
        "FP8, blocks": Stored(blocks, lambda r, c: _floats(r, c) | _blocks(r, c, group)),
        "FP8, one scale a row": Stored(
            Scaled(), lambda r, c: _floats(r, c) | {"scale": _scales(r, 1).bfloat16()}
        ),
        "FP8, one scale": Stored(
            Scaled(), lambda r, c: _floats(r, c) | {"scale": torch.tensor(0.3)}
        ),
        "FP8, e5m2": Stored(
            Scaled(), lambda r, c: _floats(r, c, torch.float8_e5m2) | {"scale": _scales(r, 1)}
        ),
        "FP8, scales of 8 bits": Stored(
            Scaled(block=(group, group)), lambda r, c: _floats(r, c) | _powers(r, c, group)
        ),
        "int8, one scale a row": Stored(
            Scaled(), lambda r, c: _integers(r, c) | {"scale": _scales(r, 1, 0.001)}
        ),
    }
    packed = {
        f"compressed-tensors, {bits} bits{name}": Stored(
            PackedIntegers(bits=bits),
            lambda r, c, bits=bits, own=own: _packed(r, c, bits, group) | own(r, c, bits),
        )
        for bits in (4, 8)
        for name, own in {
            "": lambda r, c, bits: {},
            ", asymmetric": lambda r, c, bits: {"zero_point": _words(r * bits // 32, c // group)},
            ", in the order of activations": lambda r, c, bits: {"g_idx": _shuffled(c, group)},
        }.items()
    }
    return {
        **eight_bit,
        "MXFP4": Stored(MxFp4(), _mxfp4),
        "NVFP4": Stored(NvFp4(), _nvfp4),
        "NVFP4, inverse": Stored(NvFp4(is_inverse=True), _nvfp4),
        **packed,
        **_streams(group),
        "AWQ": Stored(Awq(), lambda r, c: _awq(r, c, group)),
        **{
            f"GGUF, {name}": Stored(GGML[name], partial(random_blocks, GGML[name]))
            for name in MULTIPLIED
        },
    }


def _streams(group: int) -> Mapping[str, Stored]:
    """GPTQ's formats."""
    gptq = {
        f"GPTQ, {bits} bits": Stored(
            Gptq(bits=bits), lambda r, c, bits=bits: _gptq(r, c, bits, group)
        )
        for bits in (2, 3, 4, 8)
    }
    return {
        **gptq,
        "GPTQ, 4 bits, gptq_v2": Stored(Gptq(zero_offset=0), lambda r, c: _gptq(r, c, 4, group)),
        "GPTQ, 4 bits, desc_act": Stored(
            Gptq(is_permuted=True),
            lambda r, c: _gptq(r, c, 4, group) | {"g_idx": _shuffled(c, group)},
        ),
    }


def _words(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (rows, columns)).to(torch.int32)


def _scales(rows: int, columns: int, size: float = 0.02) -> torch.Tensor:
    return (0.5 + torch.rand(rows, columns)) * size


def _shuffled(columns: int, group: int) -> torch.Tensor:
    return (torch.arange(columns) // group)[torch.randperm(columns)].to(torch.int32)


def _floats(rows: int, columns: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensors:
    """Numbers of every size that the dtype has: also the least, which have no leading one."""
    return {
        "weight": (
            torch.randn(rows, columns) * torch.randint(-9, 1, (rows, columns)).float().exp2()
        ).to(dtype)
    }


def _integers(rows: int, columns: int) -> Tensors:
    return {"weight": torch.randint(-128, 128, (rows, columns)).to(torch.int8)}


def _blocks(rows: int, columns: int, size: int) -> Tensors:
    return {"scale": _scales(-(-rows // size), -(-columns // size), 0.2)}


def _powers(rows: int, columns: int, size: int) -> Tensors:
    return {"scale": _blocks(rows, columns, size)["scale"].to(torch.float8_e8m0fnu)}


def _mxfp4(rows: int, columns: int) -> Tensors:
    blocks = torch.randint(0, 256, (rows, columns // 32, 16), dtype=torch.uint8)
    return {
        "blocks": blocks,
        "scales": torch.randint(118, 122, (rows, columns // 32), dtype=torch.uint8),
    }


def _nvfp4(rows: int, columns: int) -> Tensors:
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scale = _scales(rows, columns // 16, 1.0).to(torch.float8_e4m3fn)
    return {"packed": packed, "scale": scale, "global": torch.tensor([0.5])}


def _packed(rows: int, columns: int, bits: int, group: int) -> Tensors:
    scale = _scales(rows, columns // group, 0.1 / 2**bits).bfloat16()
    return {
        "packed": _words(rows, columns * bits // 32),
        "scale": scale,
        "size": torch.tensor([rows, columns]),
    }


def _gptq(rows: int, columns: int, bits: int, group: int) -> Tensors:
    scales = _scales(columns // group, rows, 0.1 / 2**bits).half()
    zeros = _words(columns // group, -(-rows * bits // 32))
    return {"qweight": _words(columns * bits // 32, rows), "qzeros": zeros, "scales": scales}


def _awq(rows: int, columns: int, group: int) -> Tensors:
    scales = _scales(columns // group, rows, 0.1 / 2**4).half()
    return {
        "qweight": _words(columns, rows // 8),
        "qzeros": _words(columns // group, rows // 8),
        "scales": scales,
    }


_HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}  # where scales are


def random_blocks(form: GgmlBlocks, rows: int, columns: int) -> Tensors:
    """Return blocks of random codes. Blocks of MXFP4 have a scale of one byte, the others one or
    two of float16."""
    blocks = torch.randint(
        0, 256, (rows, columns // form.num_weights, form.nbytes), dtype=torch.uint8
    )
    if form.name == "MXFP4":
        blocks[..., 0] = torch.randint(118, 122, blocks.shape[:-1], dtype=torch.uint8)
        return {"blocks": blocks.flatten(1)}
    for start in _HALVES.get(form.name, (0,)):
        scales = _scales(*blocks.shape[:-1], size=0.1 / 2**8).half()
        blocks[..., start : start + 2] = scales[..., None].view(torch.uint8)
    return {"blocks": blocks.flatten(1)}
