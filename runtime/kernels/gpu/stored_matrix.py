"""Descriptions of a matrix of a published format for the GPU kernels: where it lies in an expert,
and what its codes mean.

Kernels are compiled for these descriptions: sizes and places are constants in them. All places are
in bytes from the expert's beginning, all distances in elements of the type that is read.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from artifacts.formats.base import Format, Stored
from artifacts.formats.fp8 import Scaled
from artifacts.formats.integers.gptq import Gptq
from artifacts.formats.integers.order import ORDER
from artifacts.formats.integers.packed_integers import PackedIntegers
from artifacts.formats.mxfp4 import MxFp4
from artifacts.formats.nvfp4 import NvFp4
from runtime.kernels.gpu.experts.gates import SILU, Gate
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.quantised.quantised_layout import PLAIN, PlacedPieces, QuantisedLayout

_FLOATS = {
    torch.float8_e4m3fn: (3, 7),
    torch.float8_e5m2: (2, 15),
}  # bits of the mantissa, bias of the exponent
_E2M1 = (1, 1)
_ZEROS = "zero_point"  # a role whose type the format leaves open


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """Codes of a matrix: their place, kind and order.

    `kind` is a `float` with `mantissa` bits of mantissa and the exponent's `bias`, a `signed`
    integer, an `integer` from which a zero-point is subtracted, or `plain`, a number of the
    module's dtype.

    `order` is the order in which codes follow each other. `rows`: bytes along the inputs, the first
    of two codes in the low half. `columns`: a stream of words down the inputs.
    """

    start: int
    kind: str
    bits: int
    order: str = "rows"
    mantissa: int = 0
    bias: int = 0


@dataclass(frozen=True, slots=True)
class StoredScales:
    """One scale of type `dtype` for `height` outputs and `width` inputs; `row` and `column` are the
    distances between scales. `matrix` is the place of the whole matrix's scale, which multiplies
    the others, or divides them if `is_inverse`."""

    start: int
    dtype: str
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


@dataclass(frozen=True, slots=True)
class GatedMatrices:
    """Matrices of a gated expert, and its activation. If gate and up are one matrix, both fields
    are that matrix; up begins with row `up_first`, and `step` is the distance between rows of
    either."""

    gate: StoredMatrix
    up: StoredMatrix
    up_first: int
    step: int
    down: StoredMatrix
    activation: Gate


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The pieces of one matrix by role: where they begin, and their types and shapes."""

    starts: dict[str, int]
    stored: dict[str, Stored]

    def scales(
        self, role: str, height: int, width: int, row: int, column: int, **others: object
    ) -> StoredScales:
        dtype = str(self.stored[role].dtype).removeprefix("torch.")
        return StoredScales(self.starts[role], dtype, height, width, row, column, **others)

    def shape(self, role: str) -> tuple[int, ...]:
        return self.stored[role].shape


def is_readable(layout: QuantisedLayout) -> bool:
    """Return whether the kernels read all matrices of experts with this layout, where down is
    one."""
    known = {type(piece.format) for piece in layout.pieces if piece.format} <= _DESCRIBE.keys()
    words = all(piece.dtype is torch.int32 for piece in layout.pieces if piece.role == _ZEROS)
    down = {piece.source for piece in layout.pieces if piece.part == DOWN}
    return known and words and down == {0}


def gated_matrices(layout: QuantisedLayout, activation: Gate = SILU) -> GatedMatrices:
    """Describe the matrices of an expert with this layout."""
    (gate, *up), (down,) = (
        [
            replace(stored_matrix(placed), bias=_bias(layout, name))
            for placed in layout.matrices[name]
        ]
        for name in (GATE_UP, DOWN)
    )
    up_first, step = (1, 2) if activation.take_turns else (0 if up else gate.num_outputs // 2, 1)
    return GatedMatrices(gate, up[0] if up else gate, up_first, step, down, activation)


def _bias(layout: QuantisedLayout, name: str) -> int | None:
    """Return the place of this part's bias in an expert, or None if there is none."""
    stored = layout.matrices.get(f"{name}_bias")
    return stored and stored[0][PLAIN][1]


def stored_matrix(placed: PlacedPieces) -> StoredMatrix:
    """Describe a matrix by its pieces and where they begin in an expert."""
    starts = {role: offset for role, (_, offset) in placed.items()}
    stored = {role: Stored(piece.dtype, piece.shape) for role, (piece, _) in placed.items()}
    form = next(piece.format for piece, _ in placed.values())
    if form is None:
        return StoredMatrix(*stored[PLAIN].shape, StoredCodes(starts[PLAIN], "plain", 0))
    return _DESCRIBE[type(form)](form, _Pieces(starts, stored), *form.shape(stored))


def _scaled(form: Scaled, pieces: _Pieces, rows: int, columns: int) -> StoredMatrix:
    dtype = pieces.stored["weight"].dtype
    kind, (mantissa, bias) = ("float", _FLOATS[dtype]) if dtype in _FLOATS else ("signed", (0, 0))
    height, width = form.scaled_block((rows, columns), pieces.shape("scale"))
    codes = StoredCodes(pieces.starts["weight"], kind, 8, mantissa=mantissa, bias=bias)
    return StoredMatrix(
        rows, columns, codes, pieces.scales("scale", height, width, -(-columns // width), 1)
    )


def _mxfp4(form: MxFp4, pieces: _Pieces, rows: int, columns: int) -> StoredMatrix:
    codes = StoredCodes(pieces.starts["blocks"], "float", 4, "rows", *_E2M1)
    count = pieces.shape("scales")[1]
    return StoredMatrix(
        rows, columns, codes, pieces.scales("scales", 1, columns // count, count, 1)
    )


def _nvfp4(form: NvFp4, pieces: _Pieces, rows: int, columns: int) -> StoredMatrix:
    codes = StoredCodes(pieces.starts["packed"], "float", 4, "rows", *_E2M1)
    count = pieces.shape("scale")[1]
    of_matrix = {"matrix": pieces.starts["global"], "is_inverse": form.is_inverse}
    return StoredMatrix(
        rows, columns, codes, pieces.scales("scale", 1, columns // count, count, 1, **of_matrix)
    )


def _packed_integers(
    form: PackedIntegers, pieces: _Pieces, rows: int, columns: int
) -> StoredMatrix:
    codes = StoredCodes(pieces.starts["packed"], "integer", form.bits)
    count = pieces.shape("scale")[1]
    scales = pieces.scales("scale", 1, columns // count, count, 1)
    order = pieces.starts.get(ORDER)
    if _ZEROS not in pieces.stored:
        return StoredMatrix(rows, columns, codes, scales, order=order)
    zeros = StoredZeros(pieces.starts[_ZEROS], pieces.shape(_ZEROS)[0], count, 1)
    return StoredMatrix(rows, columns, codes, scales, zeros, order=order)


def _gptq(form: Gptq, pieces: _Pieces, rows: int, columns: int) -> StoredMatrix:
    codes = StoredCodes(pieces.starts["qweight"], "integer", form.bits, "columns")
    count, num_words = pieces.shape("qzeros")
    scales = pieces.scales("scales", 1, max(1, columns // count), 1, rows)
    order = pieces.starts.get(ORDER)
    zeros = StoredZeros(pieces.starts["qzeros"], num_words, 1, num_words, form.zero_offset)
    return StoredMatrix(rows, columns, codes, scales, zeros, order=order)


_DESCRIBE: dict[type[Format], Callable[..., StoredMatrix]] = {
    Scaled: _scaled,
    MxFp4: _mxfp4,
    NvFp4: _nvfp4,
    PackedIntegers: _packed_integers,
    Gptq: _gptq,
}
