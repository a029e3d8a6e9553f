"""A matrix of a published format as compiled code reads it: where its codes, scales, zero-points,
order and bias lie in an expert, and what its codes mean.

GPU kernels are compiled for these descriptions: sizes and places are constants in them. All places
are in bytes from the expert's beginning, all distances in elements of the type that is read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from artifacts.formats.base import Format
from artifacts.formats.fp8 import Scaled
from artifacts.formats.gguf.ggml import GgmlBlocks
from artifacts.formats.integers.gptq import Gptq
from artifacts.formats.integers.order import ORDER
from artifacts.formats.integers.packed_integers import PackedIntegers
from artifacts.formats.mxfp4 import MxFp4
from artifacts.formats.nvfp4 import NvFp4
from runtime.model.layout import ExpertLayout, Part, PlacedParts
from runtime.model.quantised.quantised_matrix import PLAIN

_FLOATS = {
    torch.float8_e4m3fn: (3, 7),
    torch.float8_e5m2: (2, 15),
}  # bits of the mantissa, bias of the exponent
_E2M1 = (1, 1)
_ZEROS = "zero_point"  # a role whose type the format leaves open; compiled code reads int32


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


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Matrix [out, in]. Without `zeros` the zero-point of `integer` codes is half their range.
    `bias` is the place of the numbers that are added to a product. `order` is the place of the
    group and the input of each place, None if inputs are at their own places and groups follow each
    other."""

    num_outputs: int
    num_inputs: int
    codes: StoredCodes
    scales: StoredScales | None = None
    zeros: StoredZeros | None = None
    bias: int | None = None
    order: int | None = None


class _Tensors(NamedTuple):
    """The tensors of one matrix [num_outputs, num_inputs], by role."""

    placed: PlacedParts
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


Described = tuple[StoredCodes, StoredScales | None, StoredZeros | None]


def is_described(part: Part) -> bool:
    """Return whether compiled code can read a tensor: of a format that is described here, with
    zero-points in words."""
    has_words = part.role != _ZEROS or part.dtype is torch.int32
    return type(part.format) in _DESCRIBE and has_words


def stored_matrices(layout: ExpertLayout, name: str) -> list[StoredMatrix]:
    """Describe the matrices that are the rows of one parameter of an expert, with its bias."""
    biases = layout.matrices.get(f"{name}_bias")
    bias = biases and biases[0][PLAIN].offset
    return [stored_matrix(placed, bias) for placed in layout.matrices[name]]


def stored_matrix(placed: PlacedParts, bias: int | None = None) -> StoredMatrix:
    """Describe a matrix by its tensors."""
    form = next(iter(placed.values())).format
    if form is None:
        shape = placed[PLAIN].shape
        return StoredMatrix(*shape, _Tensors(placed, *shape).codes(PLAIN, "plain", 0), bias=bias)
    shape = form.shape(placed)
    described = _DESCRIBE[type(form)](form, _Tensors(placed, *shape))
    order = placed[ORDER].offset if ORDER in placed else None
    return StoredMatrix(*shape, *described, bias=bias, order=order)


def _scaled(form: Scaled, tensors: _Tensors) -> Described:
    weight = tensors.placed["weight"]
    kind, floats = ("float", _FLOATS[weight.dtype]) if weight.dtype in _FLOATS else ("signed", ())
    height, width = form.scaled_block(weight.shape, tensors.shape("scale"))
    num_groups = -(-tensors.num_inputs // width)
    scales = tensors.scales_at("scale", num_groups, height, width, num_groups, 1)
    return tensors.codes("weight", kind, 8, "rows", *floats), scales, None


def _mxfp4(form: MxFp4, tensors: _Tensors) -> Described:
    return tensors.codes("blocks", "float", 4, "rows", *_E2M1), tensors.scales("scales"), None


def _nvfp4(form: NvFp4, tensors: _Tensors) -> Described:
    codes = tensors.codes("packed", "float", 4, "rows", *_E2M1)
    scales = tensors.scales("scale", matrix=tensors.start("global"), is_inverse=form.is_inverse)
    return codes, scales, None


def _packed_integers(form: PackedIntegers, tensors: _Tensors) -> Described:
    codes = tensors.codes("packed", "integer", form.bits)
    scales = tensors.scales("scale")
    if _ZEROS not in tensors.placed:
        return codes, scales, None
    num_words, num_groups = tensors.shape(_ZEROS)
    return codes, scales, StoredZeros(tensors.start(_ZEROS), num_words, num_groups, 1)


def _gptq(form: Gptq, tensors: _Tensors) -> Described:
    codes = tensors.codes("qweight", "integer", form.bits, "columns")
    num_groups, num_words = tensors.shape("qzeros")
    width = -(-tensors.num_inputs // num_groups)
    scales = tensors.scales_at("scales", num_groups, 1, width, 1, tensors.num_outputs)
    zeros = StoredZeros(tensors.start("qzeros"), num_words, 1, num_words, form.zero_offset)
    return codes, scales, zeros


def _ggml_blocks(form: GgmlBlocks, tensors: _Tensors) -> Described:
    return tensors.codes("blocks", form.name, 0, "blocks"), None, None


_DESCRIBE: dict[type[Format], Callable[..., Described]] = {
    Scaled: _scaled,
    MxFp4: _mxfp4,
    NvFp4: _nvfp4,
    PackedIntegers: _packed_integers,
    Gptq: _gptq,
    GgmlBlocks: _ggml_blocks,
}
