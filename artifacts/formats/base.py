"""Interface of a format: the tensors that hold one matrix, checks of their types and shapes, and
the published formula."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from artifacts.common.lazy_torch import torch
from artifacts.errors import BadInput

Loop = Callable[[int, np.ndarray], None]
"""Fills an array [n, in] with the rows of the matrix from the given one on: float32, or, where the
format's `fills_bfloat16` is true, uint16 with the bits of bfloat16."""


class Stored(NamedTuple):
    """Type and shape of a stored tensor, for `shape`, which takes tensors as well."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class PlacedTensor(Protocol):
    """A tensor of a matrix at its place in an expert, `offset` bytes from the beginning."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """Codes of a matrix: their place, bytes, kind and order.

    `kind` is a `float` with `mantissa` bits of mantissa and the exponent's `bias`, a `signed`
    integer, an `integer` from which a zero-point is subtracted, `plain`, a number of the module's
    dtype, or the name of ggml's blocks.

    `order` is the order in which codes follow each other. `rows`: bytes along the inputs, the first
    of two codes in the low half. `columns`: a stream of words down the inputs. `blocks`: codes
    along the inputs in blocks that hold their scales.
    """

    start: int
    nbytes: int
    kind: str
    bits: int
    order: str = "rows"
    mantissa: int = 0
    bias: int = 0


@dataclass(frozen=True, slots=True)
class StoredScales:
    """One scale of type `dtype` for `height` outputs and `width` inputs, which are in `num_groups`;
    `row` and `column` are the distances between scales. `matrix` is the place of the whole matrix's
    scale, which multiplies the others, or divides them if `is_inverse`."""

    start: int
    dtype: str
    num_groups: int
    height: int
    width: int
    row: int
    column: int
    matrix: int | None = None
    is_inverse: bool = False


@dataclass(frozen=True, slots=True)
class StoredZeros:
    """Zero-points of `integer` codes along the outputs, in their order. `word` is the distance
    between the `num_words` words of one group, `group` the distance between groups. Stored
    zero-points are less by `offset`."""

    start: int
    num_words: int
    word: int
    group: int
    offset: int = 0


class Described(NamedTuple):
    """The parts of a matrix as compiled code reads them. All places are in bytes from the expert's
    beginning, all distances in elements of the type that is read."""

    codes: StoredCodes
    scales: StoredScales | None = None
    zeros: StoredZeros | None = None


class PlacedTensors(NamedTuple):
    """The tensors of one matrix [num_outputs, num_inputs] in an expert, by role."""

    placed: Mapping[str, PlacedTensor]
    num_outputs: int
    num_inputs: int

    def start(self, role: str) -> int:
        return self.placed[role].offset

    def shape(self, role: str) -> tuple[int, ...]:
        return self.placed[role].shape

    def codes(self, role: str, kind: str, bits: int, *others: object) -> StoredCodes:
        part = self.placed[role]
        return StoredCodes(part.offset, part.nbytes, kind, bits, *others)

    def scales(self, role: str, **others: object) -> StoredScales:
        """Describe scales [num_outputs, groups]."""
        num_groups = self.shape(role)[1]
        return self.scales_at(
            role, num_groups, 1, -(-self.num_inputs // num_groups), num_groups, 1, **others
        )

    def scales_at(self, role: str, *sizes: int, **others: object) -> StoredScales:
        part = self.placed[role]
        dtype = str(part.dtype).removeprefix("torch.")
        return StoredScales(part.offset, dtype, *sizes, **others)


class Format:
    """One way to store a matrix [out, in] in several tensors, which are known by their roles: base
    of the formats, each a frozen dataclass with its own `shape` and `dequantise`."""

    name: str
    fills_bfloat16: ClassVar[bool] = True
    described: ClassVar[Callable[..., Described] | None] = None
    """A method that describes a matrix, by its PlacedTensors, to compiled code; None where no such
    code reads the format."""

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        """The shape [out, in] of the matrix that these tensors hold, by role. Raises Unfit where
        they do not fit."""

    def dequantise(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The matrix, float32 [out, in], on the device of its tensors."""

    def loop(self, tensors: Mapping[str, torch.Tensor]) -> Loop | None:
        """The same by compiled code, for tensors on a CPU; None where only `dequantise` does it."""

    def fault(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """Return the fault of stored numbers that no matrix of a model has, for example NaN, as the
        end of a message; None if they are sound."""
        return None if are_sound(tensors.values()) else NOT_FINITE

    def row_heights(self, stored: Mapping[str, Stored]) -> Mapping[str, int] | None:
        """Return by role the number of the matrix's rows that share a row of a tensor, for the
        tensors that `dequantise` needs: it takes any rows, given their row of each. None where no
        row can be dequantised without others."""
        return dict.fromkeys(stored, 1) if len(stored) == 1 else None


@dataclass(frozen=True, slots=True)
class Turned(Format):
    """A matrix of any format that is stored transposed, [in, out], as Qwen3-VL-MoE publishes its
    experts."""

    stored: Format

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def lacking(self) -> int:
        return self.stored.lacking

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        num_inputs, num_outputs = self.stored.shape(stored)
        return num_outputs, num_inputs

    def dequantise(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.stored.dequantise(tensors).T.contiguous()

    def fault(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        return self.stored.fault(tensors)


DAMAGED = "the checkpoint is damaged"
CONTRADICTED = "weights and config.json are not of the same model"
NOT_FINITE = f"NaN or infinity, {DAMAGED}"
BEYOND = f"an index beyond its groups, {DAMAGED}"
"""Faults of stored numbers, as the end of a message."""

LARGEST = 65_504.0  # of float16
"""No weight of a model is larger: what its scales allow beyond this is damage."""


class Unfit(BadInput):
    """Tensors that do not hold a matrix of this format; the message says why, the caller adds their
    name."""


@cache
def loops(module: str = "loops") -> ModuleType:
    """The compiled loops; importing numba takes half a second."""
    return import_module(f"artifacts.formats.{module}")


def require(is_fit: bool, why: str) -> None:
    """Raise Unfit with `why` unless the tensors are fit."""
    if not is_fit:
        raise Unfit(why)


def require_groups(
    num_groups: int, num_inputs: int, group_size: int | None, *, is_indexed: bool
) -> None:
    """Raise Unfit unless the inputs are in groups of this size, which is 0 for one group and None
    if it is unknown; only with an index of groups the last one may be smaller."""
    if group_size is not None:
        size = group_size or num_inputs
        expected = -(-num_inputs // size)
        require(
            num_groups == expected,
            f"{num_groups} groups of {num_inputs} inputs, and by the config {expected}",
        )
        require(
            num_inputs % size == 0 or is_indexed,
            f"groups of {size} do not divide {num_inputs} inputs",
        )


def is_number(dtype: torch.dtype) -> bool:
    """Return whether a scale of this type is a number as it stands: a float of 16 bits or more."""
    return dtype in (torch.float32, torch.float16, torch.bfloat16)


def fault_of_scales(scales: torch.Tensor, largest_code: float) -> str | None:
    """The fault of scales that multiply codes of up to this size: not finite, all 0, or numbers
    that no model has."""
    if not are_sound([scales]):
        return NOT_FINITE
    largest = float(scales.float().abs().max())
    if largest == 0:
        return f"scales that are all 0, {DAMAGED}"
    if largest * largest_code > LARGEST:
        return f"a scale for weights of up to {largest * largest_code:.0e}, {DAMAGED}"
    return None


def are_sound(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether stored tensors hold neither NaN nor infinity; any integer is sound."""
    return all(map(_is_sound, tensors))


def _is_sound(tensor: torch.Tensor) -> bool:
    if tensor.dtype is torch.float8_e4m3fn:
        return _are_below(tensor, 0x7F)
    if tensor.dtype is torch.float8_e8m0fnu:
        return bool(tensor.view(torch.uint8).max() < 0xFF)
    if tensor.dtype is torch.float8_e5m2:
        return _are_below(tensor, 0x7C)
    return not tensor.is_floating_point() or bool(
        torch.stack(torch.aminmax(tensor)).isfinite().all()
    )


def _are_below(tensor: torch.Tensor, code: int) -> bool:
    """Return whether every 8-bit float is below a code, signs left out. Two extremes show it in a
    fiftieth of the time that comparing each float takes: positive floats are the largest as signed
    integers, negative floats the largest as unsigned integers."""
    return bool(
        tensor.view(torch.int8).max() < code and tensor.view(torch.uint8).max() < 0x80 + code
    )
