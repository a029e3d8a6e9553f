"""AWQ: 4-bit codes, eight outputs in a word and these in the order in which its kernels (`gemm`)
take them.

`w[o, k] = scales[k // g, o] * (q[k, o] - z[k // g, o])`; output 8 n + ORDER[i] has bits 4 i to 4 i
+ 3 of word n. In a slot the codes lie in GPTQ's order, in the same bytes: whatever computes with
them is GPTQ's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from artifacts.common.lazy_torch import torch
from artifacts.errors import BadInput
from artifacts.formats.base import Format, Loop, Stored, loops, require
from artifacts.formats.codes import unpack
from artifacts.formats.integers.gptq import NAMES, Gptq
from artifacts.formats.integers.order import INDEX
from artifacts.formats.integers.order import ORDER as GROUPED
from artifacts.formats.schemes import (
    BLOCK,
    HEAD,
    Group,
    Said,
    Scheme,
    Spelling,
    flag,
    group_size,
    number,
    patterns,
)

_NAME = "awq"
_BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PER_WORD = len(ORDER)


@dataclass(frozen=True, slots=True)
class Awq(Format):
    """`qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8], `scales` [groups, out]."""

    name: str = _NAME
    group_size: int | None = None  # as the config says, 0 for one group
    # `zero_point` is false: every zero-point is in the middle of the codes
    is_symmetric: bool = False

    @property
    def in_slot(self) -> Gptq:
        """The format that the same bytes have in GPTQ's order."""
        return Gptq(
            name=_NAME,
            zero_offset=0,
            is_symmetric=self.is_symmetric,
            symmetry="zero_point false",
            group_size=self.group_size,
        )

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        words = stored["qweight"]
        require(len(words.shape) == 2, "tensors that are no matrices")
        num_inputs = words.shape[0]
        require(num_inputs % _PER_WORD == 0, f"{num_inputs} inputs, no multiple of {_PER_WORD}")
        turned = Stored(words.dtype, _turned_shape(words.shape))
        return self.in_slot.shape({**stored, "qweight": turned})

    def dequantise(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.in_slot.dequantise(_turned(tensors))

    def loop(self, tensors: Mapping[str, torch.Tensor]) -> Loop | None:
        return self.in_slot.loop(_turned(tensors))

    def fault(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        return self.in_slot.fault(_turned(tensors))


def in_slot(role: str, form: Format, shape: tuple[int, ...]) -> tuple[str, Format, tuple[int, ...]]:
    """Return role, format and shape that a stored tensor has in a slot. The shape may have a
    dimension of experts in front."""
    if not isinstance(form, Awq):
        return GROUPED if role == INDEX else role, form, shape
    return role, form.in_slot, _turned_shape(shape) if role == "qweight" else shape


def is_turned(form: Format) -> bool:
    """Return whether a format in a slot is of AWQ's matrices, which `turn` puts into its order."""
    return form.name == _NAME


def turn(tensors: Mapping[str, torch.Tensor]) -> None:
    """Put the codes and zero-points of a matrix on a CPU into GPTQ's order, in place. They lie as
    they are stored, in tensors of GPTQ's shapes."""
    own = loops("integers.order_loops")
    own.turn_words(tensors["qweight"].numpy())
    own.turn_zeros(tensors["qzeros"].numpy())


def as_stored(role: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the words in a slot as they were stored."""
    if role == "scales":
        return tensor
    if role == "qweight":
        codes = unpack(tensor.T, _BITS, len(tensor) * _PER_WORD).T
    else:
        codes = unpack(tensor, _BITS, tensor.shape[1] * _PER_WORD)
    by_place = codes.unflatten(1, (-1, _PER_WORD))[..., ORDER]
    places = torch.arange(0, 32, _BITS, dtype=torch.int32)
    return (by_place << places).sum(-1, dtype=torch.int32)


def _turned(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a stored matrix in GPTQ's order; a copy."""
    words = tensors["qweight"]
    copies = {
        "qweight": words.clone().view(_turned_shape(words.shape)),
        "qzeros": tensors["qzeros"].clone(),
    }
    turn(copies)
    return {**tensors, **copies}


def _turned_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    *experts, num_inputs, num_words = shape
    return (*experts, num_inputs // _PER_WORD, num_words * _PER_WORD)


def said(config: Mapping) -> Said:
    """Read AWQ's config."""
    version = str(config.get("version") or "gemm").lower()
    if version != "gemm":
        raise BadInput(f"AWQ in the layout {version!r}: moectl reads gemm")
    number("bits", config.get("bits", config.get("w_bit")), (_BITS,))
    size = group_size({"group_size": config.get("group_size", config.get("q_group_size"))}, BLOCK)
    left = patterns(config, "modules_to_not_convert") + HEAD
    form = Awq(group_size=size, is_symmetric=flag(config, "zero_point") is False)
    spelling = Spelling(form, NAMES, is_module=True)
    scheme = Scheme(_NAME, _BITS, (1, size), 2, (spelling,), has_zeros=True)
    return Said((Group(scheme),), left)
