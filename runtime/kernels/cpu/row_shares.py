"""Experts on one token or a few, matrix by matrix in compiled code. Threads of the CPU share the
rows of each matrix, so that a single expert already uses all of them."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from runtime.kernels.cpu.threads import KernelThreads
from runtime.kernels.gates import RULES, SILU, Gate
from runtime.kernels.load import kernels

if TYPE_CHECKING:
    from artifacts.common.numba_loops import Kernel

_ROWS_AT_ONCE = 32  # a multiple of what kernels of codes by row take together
_PIECES = 2  # of a thread: more let threads even out, and cost more calls
# of a matrix, in a piece that several tokens are multiplied by: it stays in a core's cache
_PIECE_NBYTES = 1 << 19
_SCALE_NBYTES = (4, 2, 2, 1, 1)  # by SCALE_TYPE


class Rows(NamedTuple):
    """A matrix [O, I] as kernels take it: the first of its rows in the product of its part, O, the
    bytes of codes of a row, its fields (int64), its kernel of signature `published.MATRIX`, and
    whether that may take x for less than float32."""

    first: int
    count: int
    nbytes: int
    fields: np.ndarray
    kernel: "Kernel"
    is_narrow: bool


@dataclass(slots=True)
class _Job:
    """The fields of a job of `runtime.kernels.cpu.shared_experts` and all that they point to. A
    field is written through a memoryview and an address asked for once an array, since either
    takes longer in numpy than a small expert's row."""

    address: int
    fields: memoryview  # int64
    starts: np.ndarray  # int64 [n], where experts begin
    rows: np.ndarray  # int64 [n], the row of y of each
    tokens: np.ndarray  # int64 [n], the row of x of each
    held: tuple[np.ndarray, ...]
    x: np.ndarray | None = None
    y: np.ndarray | None = None


class _Jobs(threading.local):
    """The jobs of each thread, by their number of experts and of pieces."""

    def __init__(self) -> None:
        self.by_size: dict[tuple[int, int], _Job] = {}


class RowShares:
    """Experts of one form. `inner` are the matrices of gate and up, `down` those of down; `biases`
    the offsets of both biases in an expert, -1 for none. Threads can share them if they
    `are_divisible`."""

    def __init__(
        self,
        inner: Sequence[Rows],
        down: Sequence[Rows],
        dtype: torch.dtype,
        *,
        gate: Gate = SILU,
        biases: Sequence[int] = (-1, -1),
    ) -> None:
        shared = kernels("cpu.shared_experts")
        self._matrices = [*inner, *down]
        self.are_divisible = all(map(_unit, self._matrices))
        self._fields = np.zeros(shared.JOB, np.int64)
        self._fields[shared.NUM_INNER] = len(inner)
        self._fields[shared.NUM_DOWN] = len(down)
        self._fields[shared.HIDDEN] = sum(matrix.count for matrix in down)
        self._fields[shared.WIDTH] = sum(matrix.count for matrix in inner)
        self._fields[shared.NEURONS] = self._fields[shared.WIDTH] // (2 if gate.has_up else 1)
        self._fields[shared.DTYPE] = _plain_kind(dtype)
        self._fields[[shared.INNER_BIAS, shared.DOWN_BIAS]] = biases
        self._fields[shared.RULE] = RULES.index(gate.rule)
        self._fields[shared.TAKES_TURNS] = gate.take_turns
        self._constants = np.array(gate.constants, np.float32)
        self._fields[shared.CONSTANTS] = self._constants.ctypes.data
        self._num_small = _num_small(self._matrices)
        self._function = shared.add_experts.compiled()
        self._address = shared.add_experts.address()
        self._x = shared.X
        self._y = shared.Y
        self._jobs = _Jobs()

    def multiply(
        self,
        starts: Sequence[int],
        rows: Sequence[int],
        x: np.ndarray,
        y: np.ndarray,
        tokens: Sequence[int] | None = None,
    ) -> None:
        """Add to y[rows[i]], y [K, H] float32, the output of the expert at starts[i] on x [H]
        float32, or on x[tokens[i]] where x is [T, H]."""
        num_pieces = 1 if tokens is None else self._num_small
        self._function(self._job(starts, rows, x, y, num_pieces, tokens), 0)

    def multiply_on(
        self,
        threads: KernelThreads,
        num_shares: int,
        starts: Sequence[int],
        rows: Sequence[int],
        x: np.ndarray,
        y: np.ndarray,
        tokens: Sequence[int] | None = None,
    ) -> None:
        """Do the same on `num_shares` threads."""
        num_pieces = _PIECES * num_shares
        num_pieces = num_pieces if tokens is None else max(num_pieces, self._num_small)
        job = self._job(starts, rows, x, y, num_pieces, tokens)
        threads.run_compiled(self._address, job, num_shares)

    def _job(
        self,
        starts: Sequence[int],
        rows: Sequence[int],
        x: np.ndarray,
        y: np.ndarray,
        num_pieces: int,
        tokens: Sequence[int] | None,
    ) -> int:
        """Return the address of a job, which this thread's next one of as many experts
        overwrites."""
        size = len(starts), num_pieces
        jobs = self._jobs.by_size
        if size not in jobs:
            jobs[size] = self._new_job(*size)
        job = jobs[size]
        job.starts[:] = starts
        job.rows[:] = rows
        job.tokens[:] = 0 if tokens is None else tokens
        if job.x is not x:
            job.x = x
            job.fields[self._x] = x.ctypes.data
        if job.y is not y:
            job.y = y
            job.fields[self._y] = y.ctypes.data
        return job.address

    def _new_job(self, count: int, num_pieces: int) -> _Job:
        """Return a job for that many experts, with room for what is between their matrices."""
        shared = kernels("cpu.shared_experts")
        num_neurons = self._fields[shared.NEURONS]
        inner = np.empty((count, self._fields[shared.WIDTH]), np.float32)
        acts = np.empty((count, num_neurons), np.float32)
        starts = np.empty(count, np.int64)
        rows = np.empty(count, np.int64)
        tokens = np.zeros(count, np.int64)
        table = _table(self._matrices, num_pieces)
        fields = self._fields.copy()
        fields[shared.TABLE] = table.ctypes.data
        fields[shared.NUM_PIECES] = num_pieces
        fields[shared.NUM_EXPERTS] = count
        fields[shared.STARTS] = starts.ctypes.data
        fields[shared.ROWS] = rows.ctypes.data
        fields[shared.TOKENS] = tokens.ctypes.data
        fields[shared.NUM_TOKENS] = count
        fields[shared.INNER] = inner.ctypes.data
        fields[shared.ACTS] = acts.ctypes.data
        held = inner, acts, table
        return _Job(fields.ctypes.data, memoryview(fields), starts, rows, tokens, held)


class MatrixShares:
    """A matrix [O, I] outside experts, whose rows `num_shares` of the threads share. Its fields
    have addresses in place of offsets."""

    def __init__(
        self, matrix: Rows, num_inputs: int, threads: KernelThreads, num_shares: int
    ) -> None:
        shared = kernels("cpu.shared_experts")
        self._threads = threads
        self._num_shares = num_shares
        least = _PIECES * num_shares if num_shares > 1 else 1
        pieces = least, max(least, _num_small([matrix]))
        self._tables = tuple(_table([matrix], each) for each in pieces)  # of one token, and of more
        self._chosen = tuple((table.ctypes.data, len(table)) for table in self._tables)
        self._job = np.zeros(shared.JOB, np.int64)
        self._job[shared.HIDDEN] = num_inputs
        self._job[shared.NEURONS] = matrix.count
        self._written = memoryview(self._job)
        self._places = shared.TABLE, shared.NUM_PIECES, shared.NUM_TOKENS, shared.X, shared.Y
        self._function = shared.multiply_rows.compiled()
        self._address = shared.multiply_rows.address()

    def add(self, x: np.ndarray, y: np.ndarray) -> None:
        """Add x [T, I] times the matrix to y [T, O], both float32."""
        chosen = self._chosen[len(x) > 1]
        operands = *chosen, len(x), x.ctypes.data, y.ctypes.data
        for place, operand in zip(self._places, operands, strict=True):
            self._written[place] = operand
        job = self._job.ctypes.data
        if self._num_shares == 1:
            self._function(job, 0)
        else:
            self._threads.run_compiled(self._address, job, self._num_shares)


def _num_small(matrices: Sequence[Rows]) -> int:
    """Return the number of pieces that stay in a core's cache."""
    nbytes = max(matrix.count * max(matrix.nbytes, 1) for matrix in matrices)
    return max(1, nbytes // _PIECE_NBYTES)


def _table(matrices: Sequence[Rows], num_pieces: int) -> np.ndarray:
    """Return the rows of each matrix that each piece has: [pieces, matrices, RANGE]."""
    shared = kernels("cpu.shared_experts")
    table = np.zeros((num_pieces, len(matrices), shared.RANGE), np.int64)
    for number, matrix in enumerate(matrices):
        unit = _unit(matrix) or matrix.count
        for piece, own in enumerate(table[:, number]):
            first = matrix.count // unit * piece // num_pieces * unit
            last = matrix.count // unit * (piece + 1) // num_pieces * unit
            own[shared.FUNCTION] = matrix.kernel.address()
            own[shared.FIRST] = matrix.first + first
            own[shared.LAST] = matrix.first + last
            own[shared.IS_NARROW] = matrix.is_narrow
            own[shared.FIELDS :] = _fields_from(matrix, first)
    return table


def plain_rows(dtype: torch.dtype, offset: int, count: int, nbytes: int, first: int = 0) -> Rows:
    """Return a matrix of plain numbers at this offset in an expert, with `count` rows of `nbytes`
    bytes, from row `first` of its part on."""
    names = kernels("cpu.published.published")
    fields = np.full(names.NUM_FIELDS, -1)
    fields[names.KIND] = _plain_kind(dtype)
    fields[names.CODES] = offset
    fields[names.BLOCK_NBYTES] = dtype.itemsize
    return Rows(first, count, nbytes, fields, kernels("cpu.shared_experts").multiply_plain, False)


def _plain_kind(dtype: torch.dtype) -> int:
    names = kernels("cpu.published.published")
    return {
        torch.bfloat16: names.PLAIN_BFLOAT16,
        torch.float16: names.PLAIN_FLOAT16,
        torch.float32: names.PLAIN_FLOAT32,
    }[dtype]


def _unit(matrix: Rows) -> int:
    """Return the number of rows in which a matrix can be divided, so that its kernel multiplies
    each as it does in the whole; 0 if it cannot be divided."""
    names = kernels("cpu.published.published")
    fields = matrix.fields
    if fields[names.KIND] == names.STREAM:
        return 0
    if fields[names.BLOCK_NBYTES] > 0:
        return 1
    height = int(fields[names.HEIGHT])
    unit = _ROWS_AT_ONCE if height >= matrix.count else lcm(_ROWS_AT_ONCE, height)
    return 0 if matrix.count % unit else unit


def _fields_from(matrix: Rows, first: int) -> np.ndarray:
    """Return the fields of a matrix from the row `first` on."""
    names = kernels("cpu.published.published")
    fields = matrix.fields.copy()
    fields[names.CODES] += first * matrix.nbytes
    if fields[names.SCALES] >= 0:
        scales_before = first // fields[names.HEIGHT] * fields[names.NUM_GROUPS]
        fields[names.SCALES] += scales_before * _SCALE_NBYTES[fields[names.SCALE_TYPE]]
    if fields[names.ZEROS] >= 0:  # int32 words, which lie down the rows
        words_before = first * fields[names.BITS] // 32 * fields[names.NUM_GROUPS]
        fields[names.ZEROS] += words_before * 4
    return fields
