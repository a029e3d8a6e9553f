"""CPU backends of experts that lie in RAM as they were published, with compiled code for one
token."""

from collections.abc import Sequence
from ctypes import c_uint8
from functools import cached_property

import numpy as np
import torch
from torch import nn

from artifacts.formats.base import StoredCodes
from artifacts.formats.gguf.ggml import GGML
from runtime.backends.cpu.form import CpuForm, LayerForm, TokenOperands
from runtime.control.plan import Place
from runtime.kernels.cpu.row_shares import Rows, RowShares, plain_rows
from runtime.kernels.gates import SILU, Gate
from runtime.kernels.load import kernels
from runtime.model.arithmetic import DOWN, GATE_UP, UP, expert_forward
from runtime.model.layout import ExpertLayout, Layout, Part
from runtime.model.quantised.stored_matrix import StoredMatrix, is_described, stored_matrices

_BIASES = (f"{GATE_UP}_bias", f"{UP}_bias", f"{DOWN}_bias")
# for more, torch multiplies by dequantised tiles: docs/lab/performance.md has the times
_MOST_TOKENS = 4


class CpuPublished(CpuForm):
    """Backend of experts in a published format, for a model of this dtype."""

    most_tokens = _MOST_TOKENS

    def __init__(
        self,
        layout: ExpertLayout,
        dtype: torch.dtype,
        gate: Gate = SILU,
        activations: int | None = None,
    ) -> None:
        self._layout = layout
        self._activations = activations
        self._inner = GATE_UP if gate.has_up else UP
        self._dtype = dtype
        self._gate = gate

    def whole(self) -> LayerForm | None:
        if self._gate != SILU:
            return None
        gate_up, down = (stored_matrices(self._layout, part) for part in (GATE_UP, DOWN))
        if not all(self._is_in_blocks_of_32(matrix) for matrix in (*gate_up, *down)):
            return None
        rows = [row for matrix in gate_up for row in self._places(matrix, 2 // len(gate_up))]
        sizes = down[0].num_outputs, down[0].num_inputs
        return LayerForm(*sizes, (*rows, *self._places(down[0], 1)), self._layout.nbytes)

    def _is_in_blocks_of_32(self, matrix: StoredMatrix) -> bool:
        """Return whether the rows of this matrix are multiplied in the same way as rows of dense
        layers."""
        kind = matrix.codes.kind
        is_alike = self._dtype is not torch.float16 or kind not in _OF_FLOAT16
        return kind in BLOCKS_OF_32 and (is_alike or self._activations is not None)

    def _places(self, matrix: StoredMatrix, count: int) -> list[tuple[int, int]]:
        """Return the kind and offset of `count` matrices of equal size, into which the rows of a
        matrix in blocks are divided."""
        codes = matrix.codes
        kind = _number(codes.kind, self._activations)
        return [(kind, codes.start + i * (codes.nbytes // count)) for i in range(count)]

    @cached_property
    def rows(self) -> RowShares:
        """Kernels are compiled on first access, so that a run that does not use them does not wait
        for them."""
        described = [stored_matrices(self._layout, part) for part in (self._inner, DOWN)]
        biases = [-1 if first.bias is None else first.bias for first, *_ in described]
        matrices = (_rows_of(each, self._dtype, self._activations) for each in described)
        return RowShares(*matrices, self._dtype, gate=self._gate, biases=biases)


class CpuDequantised(CpuForm):
    """Backend of experts that no kernel multiplies: dequantised one at a time, and computed by
    torch as the module does."""

    def __init__(self, layout: ExpertLayout, dtype: torch.dtype, module: nn.Module) -> None:
        self._layout = layout
        self._dtype = dtype
        self._module = module

    def multiply(self, places: Sequence[Place], starts: list[int], operands: TokenOperands) -> None:
        x = torch.from_numpy(operands.x).to(self._dtype)[None]
        for start, row in zip(starts, operands.rows, strict=True):
            operands.y[row] += self._output(start, x)[0].float().numpy()

    def forward(self, place: Place, start: int, x: torch.Tensor, like: np.ndarray) -> torch.Tensor:
        return self._output(start, x)

    def _output(self, start: int, x: torch.Tensor) -> torch.Tensor:
        stored = (c_uint8 * self._layout.nbytes).from_address(start)
        views = self._layout.views(torch.frombuffer(stored, dtype=torch.uint8))
        return expert_forward(self._module, views, x, project=self._layout.project)


class CpuMixed(CpuForm):
    """Backend of experts in several layouts; the first byte of a slot is the number of its layout.
    Those without kernels are dequantised, as `module` computes them."""

    most_tokens = _MOST_TOKENS

    def __init__(
        self,
        layout: ExpertLayout,
        dtype: torch.dtype,
        gate: Gate,
        module: nn.Module,
        activations: int | None,
    ) -> None:
        self._forms = [
            CpuPublished(each, dtype, gate, activations)
            if has_kernels(each)
            else CpuDequantised(each, dtype, module)
            for each in layout.variants
        ]

    def multiply(self, places: Sequence[Place], starts: list[int], operands: TokenOperands) -> None:
        for i, start in enumerate(starts):
            own = operands._replace(rows=operands.rows[i : i + 1])
            self._form_at(start).multiply((), [start], own)

    def forward(self, place: Place, start: int, x: torch.Tensor, like: np.ndarray) -> torch.Tensor:
        return self._form_at(start).forward(place, start, x, like)

    def _form_at(self, start: int) -> CpuForm:
        return self._forms[c_uint8.from_address(start).value]


def has_published_form(layout: Layout) -> bool:
    """Return whether experts lie as published, and there is compiled code for them; where layers
    are stored in different ways, for some."""
    if layout.codes == "mixed":
        return any(map(has_kernels, layout.variants))
    return layout.codes == "published" and has_kernels(layout)


def has_kernels(layout: ExpertLayout) -> bool:
    """Return whether there is compiled code for each matrix of an expert."""
    return all(part.name in _BIASES or _is_multiplied(part, layout) for part in layout.parts)


def _is_multiplied(part: Part, layout: ExpertLayout) -> bool:
    if part.format is None:
        return part.dtype is layout.dtype and len(part.shape) == 2 and not layout.is_transposed
    return is_described(part) and (part.format.name in MULTIPLIED or part.format.name not in GGML)


def _rows_of(
    matrices: Sequence[StoredMatrix], dtype: torch.dtype, activations: int | None
) -> list[Rows]:
    """Return the matrices of one part, each with its kernel for x in this dtype, or of so many
    bits."""
    rows = []
    first = 0
    lanes = kernels("cpu.lanes")
    by_row = _NARROW_ROWS.get(dtype, _ROWS) if lanes.HAS_BYTE_TABLES else _ROWS
    others = _KERNELS | _OF_FLOAT16 if dtype is torch.float16 and lanes.HAS_PAIRS else _KERNELS
    for matrix in matrices:
        if matrix.codes.kind == "plain":
            row_nbytes = dtype.itemsize * matrix.num_inputs
            rows.append(
                plain_rows(dtype, matrix.codes.start, matrix.num_outputs, row_nbytes, first)
            )
            first += matrix.num_outputs
            continue
        kind = _kind(matrix.codes)
        is_rounded = activations is not None and kind in BLOCKS_OF_32
        module, name, narrow = _KERNELS[kind] if is_rounded else others.get(kind, by_row)
        is_narrow = dtype in narrow and (lanes.HAS_PAIRS or name in _OF_INTEGERS)
        nbytes = matrix.codes.nbytes // matrix.num_outputs
        kernel = getattr(kernels(module), name)
        fields = _fields(matrix, activations)
        rows.append(Rows(first, matrix.num_outputs, nbytes, fields, kernel, is_narrow))
        first += matrix.num_outputs
    return rows


def _number(kind: str, activations: int | None) -> int:
    """Return the number of a kind, for tokens of so many bits."""
    names = kernels("cpu.published.published")
    is_rounded = activations is not None and kind in BLOCKS_OF_32
    return getattr(names, kind) + names.IN_BYTES * is_rounded


def _fields(matrix: StoredMatrix, activations: int | None) -> np.ndarray:
    """Return the fields of `runtime.kernels.cpu.published.published`."""
    names = kernels("cpu.published.published")
    codes = matrix.codes
    fields = np.full(names.NUM_FIELDS, -1)
    fields[names.KIND] = _number(_kind(codes), activations)
    fields[names.CODES] = codes.start
    fields[names.BITS] = codes.bits
    fields[names.HEIGHT] = 1
    if codes.kind in GGML:
        fields[names.BLOCK_NBYTES] = GGML[codes.kind].nbytes
    if scales := matrix.scales:
        fields[names.SCALES] = scales.start
        fields[names.SCALE_TYPE] = getattr(names, _SCALE_TYPES[scales.dtype])
        fields[names.HEIGHT] = scales.height
        fields[names.WIDTH] = scales.width
        fields[names.NUM_GROUPS] = scales.num_groups
        fields[names.IS_INVERSE] = scales.is_inverse
    if scales and scales.matrix is not None:
        fields[names.WHOLE] = scales.matrix
    if zeros := matrix.zeros:
        fields[names.ZEROS] = zeros.start
        fields[names.ZERO_OFFSET] = zeros.offset
    if matrix.order is not None:
        fields[names.ORDER] = matrix.order
    return fields


def _kind(codes: StoredCodes) -> str:
    """Return the name of the kernels' `KIND` of these codes."""
    if codes.order == "columns":
        return "STREAM"
    return _KINDS.get((codes.kind, codes.bits, codes.mantissa), codes.kind)


_KINDS = {
    ("float", 4, 1): "FLOATS_4",
    ("float", 8, 3): "E4M3",
    ("float", 8, 2): "E5M2",
    ("signed", 8, 0): "INT8",
    ("integer", 4, 0): "INTEGERS_4",
    ("integer", 8, 0): "UINT8",
}  # by kind, bits and mantissa; ggml's blocks have their own names
_SCALE_TYPES = {
    "float32": "FLOAT32",
    "float16": "FLOAT16",
    "bfloat16": "BFLOAT16",
    "float8_e8m0fnu": "E8M0",
    "uint8": "E8M0",
    "float8_e4m3fn": "FLOAT8",
}
_BFLOAT16 = (torch.bfloat16,)
_HALVES = (torch.bfloat16, torch.float16)
_ROWS = ("cpu.published.rows", "multiply", ())
_NARROW_ROWS = {
    torch.bfloat16: ("cpu.published.narrow_rows", "multiply", ()),
    torch.float16: ("cpu.published.narrow_rows", "multiply_float16", ()),
}
_BLOCKS = (
    *("Q8_0", "Q5_0", "Q4_0", "IQ4_NL", "MXFP4"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
)
BLOCKS_OF_32 = tuple(name for name in _BLOCKS if GGML[name].num_weights == 32)
"""ggml's types that kernels also multiply by tokens of 8 bits."""

_GRIDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
MULTIPLIED = (*_BLOCKS, *_GRIDS, "Q2_0")
"""ggml's types that the kernels multiply."""

_OF_INTEGERS = ("multiply_points", "multiply_blocks_of_256", "multiply_blocks_of_32")
"""Kernels that may take x for whole numbers on any processor."""
# of formats that are not row by row, with the dtypes of x that they may take for less than float32
_KERNELS = {
    "STREAM": ("cpu.published.columns", "multiply_stream", _HALVES),
    **{
        name: ("cpu.published.blocks", f"multiply_blocks_of_{GGML[name].num_weights}", _BFLOAT16)
        for name in _BLOCKS
    },
    **dict.fromkeys(_GRIDS, ("cpu.published.grids", "multiply_points", _HALVES)),
    "Q2_0": ("cpu.published.blocks", "multiply_blocks_of_64", ()),
}
_OF_FLOAT16 = {
    name: ("cpu.published.blocks", f"multiply_blocks_of_{GGML[name].num_weights}_float16", ())
    for name in _BLOCKS
    if name not in ("Q8_0", "Q5_0")  # whose codes are multiplied in float32
}
