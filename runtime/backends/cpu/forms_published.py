"""CPU backends of experts that lie in RAM as they were published, with compiled code for one
token."""

from collections.abc import Mapping, Sequence
from ctypes import c_uint8
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from artifacts.formats.base import Format
from artifacts.formats.fp8 import Scaled
from artifacts.formats.gguf.ggml import GGML, GgmlBlocks
from artifacts.formats.integers.gptq import Gptq
from artifacts.formats.integers.order import ORDER
from artifacts.formats.integers.packed_integers import PackedIntegers
from artifacts.formats.mxfp4 import MxFp4
from artifacts.formats.nvfp4 import GROUP as NVFP4_GROUP
from artifacts.formats.nvfp4 import NvFp4
from runtime.backends.cpu.form import CpuForm, LayerForm, TokenOperands
from runtime.control.plan import Place
from runtime.kernels.clamped_gate import ClampedGate
from runtime.kernels.cpu.row_shares import Rows, RowShares
from runtime.kernels.load import kernels
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.layout import Layout
from runtime.model.quantised.mixed_layout import MixedLayout
from runtime.model.quantised.quantised_layout import Piece, PlacedPieces, QuantisedLayout

_ZEROS = "zero_point"  # a tensor that may be missing, and which the kernels take as int32
_BIASES = (f"{GATE_UP}_bias", f"{DOWN}_bias")
_NOT_THERE = -1
# for more, torch multiplies by dequantised tiles: docs/performance.md has the times
_MOST_TOKENS = 4


Described = dict[
    str, int | str
]  # fields of a matrix, by name; a constant of the kernels by its name


class PublishedMatrix(NamedTuple):
    """One matrix [num_outputs, num_inputs] of an expert: its tensors by role, and the offset of
    each in bytes."""

    format: Format
    tensors: Mapping[str, Piece]
    offsets: Mapping[str, int]
    num_outputs: int
    num_inputs: int


class CpuPublished(CpuForm):
    """Backend of experts in a published format, for a model of this dtype. They have the clamped
    `gate` and biases, or SiLU's gate and no biases."""

    most_tokens = _MOST_TOKENS

    def __init__(
        self, layout: QuantisedLayout, dtype: torch.dtype, gate: ClampedGate | None = None
    ) -> None:
        self._layout = layout
        self._dtype = dtype
        self._gate = gate
        self._offsets = {
            piece.part: offset for piece, offset in zip(layout.pieces, layout.offsets, strict=True)
        }

    def whole(self) -> LayerForm | None:
        gate_up, down = (_matrices(self._layout, part) for part in (GATE_UP, DOWN))
        if self._gate or not all(self._is_in_blocks_of_32(matrix) for matrix in (*gate_up, *down)):
            return None
        rows = [row for matrix in gate_up for row in _places(matrix, 2 // len(gate_up))]
        return LayerForm(*down[0][3:], (*rows, *_places(down[0], 1)), self._layout.nbytes)

    def _is_in_blocks_of_32(self, matrix: PublishedMatrix) -> bool:
        """Return whether the rows of this matrix are multiplied in the same way as rows of dense
        layers."""
        form = matrix.format
        has_blocks = isinstance(form, GgmlBlocks) and form.num_weights == 32
        return has_blocks and (self._dtype is not torch.float16 or form.name not in _OF_FLOAT16)

    @cached_property
    def rows(self) -> RowShares:
        """Kernels are compiled on first access, so that a run that does not use them does not wait
        for them."""
        matrices = (_rows_of(self._layout, part, self._dtype) for part in (GATE_UP, DOWN))
        biases = [self._offsets.get(part, -1) for part in _BIASES]
        return RowShares(*matrices, self._dtype, gate=self._gate, biases=biases)


class CpuMixed(CpuForm):
    """Backend of experts in several layouts; the first byte of a slot is the number of its
    layout."""

    most_tokens = _MOST_TOKENS

    def __init__(
        self, layout: MixedLayout, dtype: torch.dtype, gate: ClampedGate | None = None
    ) -> None:
        self._forms = [CpuPublished(each, dtype, gate) for each in layout.layouts]

    def multiply(self, places: Sequence[Place], starts: list[int], operands: TokenOperands) -> None:
        for i, start in enumerate(starts):
            form = self._forms[c_uint8.from_address(start).value]
            form.multiply(
                (), [start + MixedLayout.start], operands._replace(rows=operands.rows[i : i + 1])
            )


def has_published_form(layout: Layout) -> bool:
    """Return whether experts lie as published, and there is compiled code for each of their
    matrices."""
    if isinstance(layout, MixedLayout):
        return all(has_published_form(each) for each in layout.layouts)
    return isinstance(layout, QuantisedLayout) and all(
        piece.part in _BIASES
        or (
            type(piece.format) in _DESCRIBED
            and (piece.role != _ZEROS or piece.dtype is torch.int32)
        )
        for piece in layout.pieces
    )


def _rows_of(layout: QuantisedLayout, part: str, dtype: torch.dtype) -> list[Rows]:
    """Return the matrices that are the rows of one part, each with its kernel for x in this
    dtype."""
    matrices = []
    first = 0
    lanes = kernels("cpu.lanes")
    by_row = _NARROW_ROWS.get(dtype, _ROWS) if lanes.HAS_BYTE_TABLES else _ROWS
    others = _KERNELS | _OF_FLOAT16 if dtype is torch.float16 and lanes.HAS_PAIRS else _KERNELS
    for matrix in _matrices(layout, part):
        described = _DESCRIBED[type(matrix.format)](matrix)
        module, name, narrow = others.get(described["KIND"], by_row)
        fields = np.array(_fields({"HEIGHT": 1} | described))
        is_narrow = lanes.HAS_PAIRS and dtype in narrow
        codes = matrix.tensors[_CODES[type(matrix.format)]].nbytes // matrix.num_outputs
        kernel = getattr(kernels(module), name)
        matrices.append(Rows(first, matrix.num_outputs, codes, fields, kernel, is_narrow))
        first += matrix.num_outputs
    return matrices


def _matrices(layout: QuantisedLayout, part: str) -> list[PublishedMatrix]:
    """Return the matrices that are the rows of one part."""
    return [_matrix(placed) for placed in layout.matrices[part]]


def _matrix(placed: PlacedPieces) -> PublishedMatrix:
    tensors, offsets = ({role: each[i] for role, each in placed.items()} for i in (0, 1))
    form = next(iter(tensors.values())).format
    return PublishedMatrix(form, tensors, offsets, *form.shape(tensors))


def _places(matrix: PublishedMatrix, count: int) -> list[tuple[int, int]]:
    """Return the kind and offset of `count` matrices of equal size, into which the rows of a matrix
    in blocks are divided."""
    start = matrix.offsets["blocks"]
    nbytes = matrix.tensors["blocks"].nbytes // count
    return [
        (getattr(kernels("cpu.published.published"), matrix.format.name), start + i * nbytes)
        for i in range(count)
    ]


def _fields(described: Described) -> list[int]:
    """Return the fields of `runtime.kernels.cpu.published.published`."""
    names = kernels("cpu.published.published")
    values = [_NOT_THERE] * kernels("cpu.published.published").NUM_FIELDS
    for name, value in described.items():
        values[getattr(names, name)] = getattr(names, value) if isinstance(value, str) else value
    return values


def _scales(matrix: PublishedMatrix, role: str, num_groups: int) -> Described:
    """Return the fields that describe scales in groups of columns to the kernels."""
    return {
        "SCALES": matrix.offsets[role],
        "SCALE_TYPE": _SCALE_TYPES[matrix.tensors[role].dtype],
        "NUM_GROUPS": num_groups,
        "WIDTH": -(-matrix.num_inputs // num_groups),
    }


def _eight_bit_floats(matrix: PublishedMatrix) -> Described:
    scale = matrix.tensors["scale"]
    weight = matrix.tensors["weight"]
    height, width = matrix.format.scaled_block(weight.shape, scale.shape)
    described = _scales(matrix, "scale", -(-matrix.num_inputs // width))
    kind = {torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2", torch.int8: "INT8"}[
        weight.dtype
    ]
    return described | {
        "KIND": kind,
        "CODES": matrix.offsets["weight"],
        "HEIGHT": height,
        "WIDTH": width,
    }


def _mxfp4(matrix: PublishedMatrix) -> Described:
    described = _scales(matrix, "scales", matrix.tensors["scales"].shape[1])
    return described | {"KIND": "FLOATS_4", "CODES": matrix.offsets["blocks"]}


def _nvfp4(matrix: PublishedMatrix) -> Described:
    return _scales(matrix, "scale", matrix.num_inputs // NVFP4_GROUP) | {
        "KIND": "FLOATS_4",
        "CODES": matrix.offsets["packed"],
        "WHOLE": matrix.offsets["global"],
        "IS_INVERSE": int(matrix.format.is_inverse),
    }


def _packed_integers(matrix: PublishedMatrix) -> Described:
    return _scales(matrix, "scale", matrix.tensors["scale"].shape[1]) | {
        "KIND": "INTEGERS_4" if matrix.format.bits == 4 else "UINT8",
        "CODES": matrix.offsets["packed"],
        "BITS": matrix.format.bits,
        "ZEROS": matrix.offsets.get(_ZEROS, _NOT_THERE),
        "ORDER": matrix.offsets.get(ORDER, _NOT_THERE),
    }


def _gptq(matrix: PublishedMatrix) -> Described:
    return _scales(matrix, "scales", matrix.tensors["scales"].shape[0]) | {
        "KIND": "STREAM",
        "CODES": matrix.offsets["qweight"],
        "BITS": matrix.format.bits,
        "ZEROS": matrix.offsets["qzeros"],
        "ZERO_OFFSET": matrix.format.zero_offset,
        "ORDER": matrix.offsets.get(ORDER, _NOT_THERE),
    }


def _ggml_blocks(matrix: PublishedMatrix) -> Described:
    form = matrix.format
    return {"KIND": form.name, "CODES": matrix.offsets["blocks"], "BLOCK_NBYTES": form.nbytes}


_DESCRIBED = {
    Scaled: _eight_bit_floats,
    MxFp4: _mxfp4,
    NvFp4: _nvfp4,
    PackedIntegers: _packed_integers,
    Gptq: _gptq,
    GgmlBlocks: _ggml_blocks,
}
_CODES = {
    Scaled: "weight",
    MxFp4: "blocks",
    NvFp4: "packed",
    PackedIntegers: "packed",
    Gptq: "qweight",
    GgmlBlocks: "blocks",
}  # the role of the tensor that holds a matrix's codes
_SCALE_TYPES = {
    torch.float32: "FLOAT32",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float8_e8m0fnu: "E8M0",
    torch.uint8: "E8M0",
    torch.float8_e4m3fn: "FLOAT8",
}
_BFLOAT16 = (torch.bfloat16,)
_HALVES = (torch.bfloat16, torch.float16)
_ROWS = ("cpu.published.rows", "multiply", ())
_NARROW_ROWS = {
    torch.bfloat16: ("cpu.published.narrow_rows", "multiply", ()),
    torch.float16: ("cpu.published.narrow_rows", "multiply_float16", ()),
}
# of formats that are not row by row, with the dtypes of x that they may take for less than float32
_KERNELS = {
    "STREAM": ("cpu.published.columns", "multiply_stream", _HALVES),
    **{
        name: ("cpu.published.blocks", f"multiply_blocks_of_{form.num_weights}", _BFLOAT16)
        for name, form in GGML.items()
    },
}
_OF_FLOAT16 = {
    name: ("cpu.published.blocks", f"multiply_blocks_of_{form.num_weights}_float16", ())
    for name, form in GGML.items()
    if name != "Q8_0"  # whose codes are multiplied in float32
}
