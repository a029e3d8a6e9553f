"""Triton kernels for experts on few tokens: each kernel finds an expert in the arena of slots by
its number.

One kernel computes the activation of gate and up for every token and rank, one the down projection
of it. The weighted sum over experts ends the latter, or is a kernel of its own
(`runtime.kernels.gpu.experts.weighted_sum`). Products are summed in float32, and results are
rounded where the module rounds them; tools.gpu.bench times them. Importing this module imports
triton, which is optional.

A pair is a token and a rank; there are T * K pairs. `numbers` gives for each pair the index into
`starts` of its expert; `starts` are in weights from the beginning of the arena. A negative number
means that the pair has no expert, or that its expert is not loaded yet.
"""

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from runtime.kernels.gates import SILU, Gate
from runtime.kernels.gpu.addressing import Numbers, Strides, arguments
from runtime.kernels.gpu.blocks import activated, expert_start, load_block, number_of, with_bias
from runtime.kernels.gpu.experts.weighted_sum import sum_last
from runtime.kernels.gpu.repeated import Kept, Repeated, blocks, width
from runtime.kernels.gpu.total import Total

# outputs of one program: few, so that one token's experts are work for every multiprocessor
_ROWS = 8
_COLUMNS = 256  # weights of a row at a time
_MOST_KEPT = 1024  # layers


class GatedKernels:
    """The two kernels for experts in the layout of `strides`, gated by `gate`."""

    def __init__(self, strides: Strides, gate: Gate = SILU) -> None:
        self._strides = strides
        self._gate = gate
        self._launches: dict[tuple, _Launches] = {}

    def multiply(
        self,
        x: torch.Tensor,
        numbers: Numbers,
        starts: torch.Tensor,
        arena: torch.Tensor,
        y: torch.Tensor,
        *,
        total: Total | None = None,
    ) -> None:
        """Write y [T * K, H] float32 for the pairs that have an expert: x [T, H], numbers [T, K],
        arena of x's dtype. The outputs of segments are added to it. With `total` the outputs of one
        token, of this call and of earlier ones, are then added up."""
        top_k, num_pairs, (numbers, *words), are_packed = arguments(numbers, starts)
        key = x.shape[1], top_k, num_pairs, are_packed, total and total.is_wide
        if (found := self._launches.get(key)) is None:
            self._launches[key] = found = self._prepared(*key)
        done = total and total.done
        kept = found.kept.get(id(starts))
        if kept is None or not kept.is_of(starts, arena, y, done):
            kept = _Kept(starts, arena, y, done, self._inner(x, num_pairs))
            if num_pairs == top_k:
                found.keep(kept)
        found.inner((x, numbers), words, kept.of_inner)
        summed = (None,) * 3 if total is None else (total.keys, total.weights, total.out)
        found.down((numbers, *summed), words, kept.of_down)

    def _prepared(
        self, hidden: int, top_k: int, num_pairs: int, are_packed: bool, is_wide: bool | None
    ) -> "_Launches":
        """Return the launches for these sizes; `is_wide` is None if nothing is added up."""
        strides = self._strides
        rows, columns = _block(is_along_rows=strides.row == 1)
        rows //= 1 + strides.are_paired
        inner = Repeated(
            _inner, (blocks(strides.neurons, rows), num_pairs),
            (hidden, strides.neurons, top_k, *strides.inner),
            gate=self._gate, are_paired=strides.are_paired, has_bias=strides.biases is not None,
            are_packed=are_packed, block_rows=rows, block_columns=columns,
        )  # fmt: skip
        rows, columns = _block(is_along_rows=strides.output == 1)
        down = Repeated(
            _down, (blocks(hidden, rows), num_pairs),
            (hidden, strides.neurons, top_k, *strides.outer),
            has_bias=strides.has_down_bias, are_packed=are_packed, adds=strides.is_cut,
            block_rows=rows, block_columns=columns,
            sums=is_wide is not None, is_wide=bool(is_wide), width=width(top_k),
        )  # fmt: skip
        return _Launches(inner, down)

    def _inner(self, x: torch.Tensor, num_pairs: int) -> torch.Tensor:
        """Return room for the activations of all pairs."""
        return torch.empty(num_pairs, self._strides.neurons, dtype=x.dtype, device=x.device)


class _Kept:
    """Operands of a token's launches besides the token, for these `starts`. One stream computes all
    steps, so that the activations of all of them can have the same room `inner`."""

    __slots__ = ("_own", "of_down", "of_inner", "starts")

    def __init__(
        self,
        starts: torch.Tensor,
        arena: torch.Tensor,
        y: torch.Tensor,
        done: torch.Tensor | None,
        inner: torch.Tensor,
    ) -> None:
        self.starts = starts
        self._own = (arena, y, done)
        self.of_inner = Kept(starts, arena, inner)
        self.of_down = Kept(inner, starts, arena, y, done)

    def is_of(
        self, starts: torch.Tensor, arena: torch.Tensor, y: torch.Tensor, done: torch.Tensor | None
    ) -> bool:
        own_arena, own_y, own_done = self._own
        return starts is self.starts and arena is own_arena and y is own_y and done is own_done


@dataclass(eq=False, slots=True)
class _Launches:
    """Both launches for tokens of one kind, and their other operands, by the place of `starts` in
    the host's memory."""

    inner: Repeated
    down: Repeated
    kept: dict[int, _Kept] = field(default_factory=dict)

    def keep(self, kept: _Kept) -> None:
        """Keep these operands for the next launches with the same `starts`, since those of a layer
        may be a tensor of their own."""
        if len(self.kept) >= _MOST_KEPT:
            self.kept.clear()
        self.kept[id(kept.starts)] = kept


def _block(*, is_along_rows: bool) -> tuple[int, int]:
    """Return the rows and columns of a matrix at a time: the long side runs along the weights that
    are adjacent in memory."""
    return (_COLUMNS // 4, 4 * _ROWS) if is_along_rows else (_ROWS, _COLUMNS)


@triton.jit
def _product(
    x_ptr,
    matrix_ptr,
    rows,
    num_rows,
    num_columns,
    row,
    column,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    """Multiply some rows of a matrix [num_rows, num_columns] by a vector: float32 [block_rows].
    Rows lie `row` weights apart, columns `column` weights."""
    sums = tl.zeros((block_rows, block_columns), tl.float32)
    is_row = rows < num_rows
    for first in range(0, num_columns, block_columns):
        columns = first + tl.arange(0, block_columns)
        is_column = columns < num_columns
        x = tl.load(x_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
        places = rows[:, None] * row + columns[None, :] * column
        weights = load_block(matrix_ptr + places, is_row, is_column)
        sums += weights.to(tl.float32) * x[None, :]
    return tl.sum(sums, axis=1)


@triton.jit(do_not_specialize=["first", "second", "third", "fourth"])
def _inner(
    x_ptr, numbers_ptr, starts_ptr, arena_ptr, inner_ptr, first, second, third, fourth, hidden,
    neurons, top_k,
    gate_offset, up_offset, row, column, gate_bias, up_bias, bias_step,
    gate: tl.constexpr, are_paired: tl.constexpr, has_bias: tl.constexpr,
    are_packed: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """Compute the activation of some neurons of one pair."""
    pair = tl.program_id(1)
    number = number_of(pair, numbers_ptr, first, second, third, fourth, are_packed)
    if number >= 0:
        expert_ptr = arena_ptr + expert_start(starts_ptr, number)
        token_ptr = x_ptr + (pair // top_k) * hidden
        dtype: tl.constexpr = inner_ptr.dtype.element_ty
        rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
        gate_ptr = expert_ptr + gate_offset
        if are_paired:
            both = tl.program_id(0) * (2 * block_rows) + tl.arange(0, 2 * block_rows)
            y = _product(
                token_ptr,
                gate_ptr,
                both,
                2 * neurons,
                hidden,
                row,
                column,
                2 * block_rows,
                block_columns,
            )
            gates, ups = tl.split(tl.reshape(y, (block_rows, 2)))
        else:
            gates = _product(
                token_ptr, gate_ptr, rows, neurons, hidden, row, column, block_rows, block_columns
            )
            ups = gates
            if gate.has_up:
                up_ptr = expert_ptr + up_offset
                ups = _product(
                    token_ptr, up_ptr, rows, neurons, hidden, row, column, block_rows, block_columns
                )
        if has_bias:
            gates = with_bias(
                gates, expert_ptr + gate_bias, rows * bias_step, rows < neurons, dtype
            )
            ups = with_bias(ups, expert_ptr + up_bias, rows * bias_step, rows < neurons, dtype)
        tl.store(
            inner_ptr + pair * neurons + rows,
            activated(gates, ups, gate, dtype),
            mask=rows < neurons,
        )


@triton.jit(do_not_specialize=["first", "second", "third", "fourth"])
def _down(
    numbers_ptr, keys_ptr, weights_ptr, out_ptr, inner_ptr, starts_ptr, arena_ptr, y_ptr, done_ptr,
    first, second, third, fourth, hidden, neurons, top_k, down_offset, output, neuron, bias,
    has_bias: tl.constexpr, are_packed: tl.constexpr, adds: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
    sums: tl.constexpr, is_wide: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Compute some outputs of one pair's expert."""
    pair = tl.program_id(1)
    number = number_of(pair, numbers_ptr, first, second, third, fourth, are_packed)
    if number >= 0:
        expert_ptr = arena_ptr + expert_start(starts_ptr, number)
        down_ptr = expert_ptr + down_offset
        rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
        acts_ptr = inner_ptr + pair * neurons
        outputs_ptr = y_ptr + pair * hidden + rows
        y = _product(
            acts_ptr, down_ptr, rows, hidden, neurons, output, neuron, block_rows, block_columns
        )
        if has_bias:
            y = with_bias(y, expert_ptr + bias, rows, rows < hidden, inner_ptr.dtype.element_ty)
        if adds:
            y += tl.load(outputs_ptr, mask=rows < hidden, other=0.0)
        tl.store(outputs_ptr, y, mask=rows < hidden)
    if sums:
        sum_last(
            y_ptr,
            keys_ptr,
            weights_ptr,
            out_ptr,
            done_ptr,
            hidden,
            top_k,
            is_wide,
            width,
            block_rows,
        )
