"""Encoder of matrices to trellis codes that keep products with calibration inputs: rotation, error
feedback, best paths.

QTIP's codes with the columns of LDLQ (QuIP#, Tseng et al. 2024), and two differences. First, a
sequence is one input's column, along the outputs: errors pass from column to column without blocks,
and a row may have a Hessian of its own. Second, few bits cannot hold all of a weight's power, so
the codes aim at `W H (H + d)^-1` in the metric `H + d`. Here d is the water level at which Gaussian
weights need as many bits (reverse water-filling); the scales make up for it.

With the same weights and Hessians the codes are the same on every machine.
"""

from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch

from artifacts.errors import BadInput
from artifacts.quantisation.trellis.rotation import rotate
from artifacts.quantisation.trellis.trellis import (
    BLOCK_ROWS,
    HALF_BITS,
    ROW_STEPS,
    STATE_BITS,
    Trellis,
    fitting,
    hashes,
    pack,
    row_factors,
    steps,
    tables,
)
from artifacts.quantisation.trellis.trellis_metric import factorise, solve, weigh
from artifacts.quantisation.trellis.trellis_search import code_columns

_DRAFT_STATE_BITS = 8  # of the draft that shows how far errors move the weights of each row
_STATE_BITS_A_ROW = 5  # at least, beside the bits of a row: as many states as a vector
_MORE_BITS = 1.15  # what the water level counts a bit as: the best on two models
_WATER_STEPS = 4  # levels by factor 2, so that the last bits of eigenvalues do not matter
_LEAST_SCALE = 1e-15
_LEAST_DAMP = 1e-6  # of the mean of all groups, for one that no token reaches
_FITTED_TOGETHER = 64  # columns, whose numbers stay in the cache
_FIT = (0.3, 3.0)  # what a scale may change by once codes are known


def rotated(moments: np.ndarray) -> np.ndarray:
    """Turn moments X^T X [in, in] of inputs into moments of rotated inputs, float32."""
    return rotate(np.ascontiguousarray(rotate(moments.astype(np.float32)).T))


class Encoder:
    """One matrix [out, in] and the Hessians [G, in, in] of its groups of rows, of rotated inputs
    (`rotated`). `groups` int [out] is by default all one; `damp` is added to diagonals, as a share
    of their mean.

    Where outputs are rotated, rows are mixed, so that there can be one group only. Raises BadInput
    for numbers that are not finite.
    """

    def __init__(
        self,
        weight: np.ndarray,
        hessians: np.ndarray,
        groups: np.ndarray | None = None,
        *,
        rotates_outputs: bool,
        damp: float,
    ) -> None:
        if not (np.isfinite(weight).all() and np.isfinite(hessians).all()):
            raise BadInput(
                "weights or calibration inputs hold values that are not finite: the checkpoint is "
                "damaged"
            )
        assert not rotates_outputs or len(hessians) == 1, len(hessians)
        groups = np.zeros(len(weight), np.int64) if groups is None else groups
        self._is_rotated = rotates_outputs
        self._num_outputs = len(weight)
        self._order = np.argsort(groups, kind="stable").astype(np.int32)
        self._ends = np.cumsum(np.bincount(groups, minlength=len(hessians))).astype(np.int32)
        moments = _normal(hessians, damp)
        mean = moments.mean(0)
        # the largest is coded first: the others can help it
        self._inputs = np.argsort(mean.diagonal(), kind="stable")
        self._sizes = moments.diagonal(axis1=1, axis2=2).mean(1)
        self._eigenvalues = np.linalg.eigvalsh(mean.astype(np.float64))
        self._hessians = moments.take(self._inputs, 1).take(self._inputs, 2)
        columns = rotate(weight.astype(np.float32)).T
        columns = rotate(np.ascontiguousarray(columns)) if rotates_outputs else columns
        self._weights = np.ascontiguousarray(columns[self._inputs][:, self._order])

    def at(self, bits: float, *, state_bits: int = STATE_BITS) -> Trellis:
        """Return the matrix in at most `bits` bits a weight, scales and all (`fitting`)."""
        half_bits, num_high = fitting(
            self._num_outputs, len(self._weights), bits, is_rotated=self._is_rotated
        )
        ridges = self._sizes * self._water((half_bits + num_high / len(self._weights)) / 2)
        ratios = self._hessians.copy()
        pivots = np.empty(self._hessians.shape[:2], np.float32)
        factorise(ratios, pivots, ridges)
        aim = self._weights.copy()
        solve(ratios, pivots, self._ends, aim)
        aim = self._weights - self._by_place(ridges) * aim
        is_high = self._is_high(pivots, num_high)
        run = partial(self._run, aim, ratios, pivots, half_bits + is_high.astype(np.uint8))
        draft_bits = max(
            _DRAFT_STATE_BITS, min((half_bits + 2) // 2, HALF_BITS[-1] // 2) + _STATE_BITS_A_ROW
        )
        draft = run(self._scales(np.sqrt(np.square(aim).mean(0))), draft_bits)
        scales = self._scales(np.sqrt(draft.energies))
        coded = run(scales, state_bits)
        fitted = self._fitted(aim - coded.errors, coded.weighed, scales, (ratios, pivots, ridges))
        return self._stored(coded.paths, half_bits, is_high, fitted, state_bits)

    def _run(
        self,
        aim: np.ndarray,
        ratios: np.ndarray,
        pivots: np.ndarray,
        half_bits: np.ndarray,
        scales: "_Scales",
        state_bits: int,
    ) -> "_Coded":
        rows = -(-self._num_outputs // BLOCK_ROWS) * BLOCK_ROWS
        coded = _Coded(
            np.empty((len(aim), rows), np.uint16),
            np.empty_like(aim),
            np.empty(self._num_outputs, np.float32),
            aim.copy(),
        )
        given = (
            self._order,
            self._ends,
            scales.deviations(self._num_outputs),
            half_bits,
            _levels(),
            _hashes(state_bits),
        )
        code_columns(
            coded.weighed, ratios, pivots, *given, coded.paths, coded.errors, coded.energies
        )
        return coded

    def _water(self, bits: float) -> np.float32:
        """Return the water level at which Gaussian weights under the mean Hessian need `bits` bits
        each."""
        grid = np.exp2(np.arange(-60, 30) / _WATER_STEPS)
        needed = np.log2(1 + np.maximum(self._eigenvalues, 0) / grid[:, None]).mean(1) / 2
        return np.float32(
            grid[np.searchsorted(-needed, -_MORE_BITS * bits).clip(max=len(grid) - 1)]
        )

    def _by_place(self, of_groups: np.ndarray) -> np.ndarray:
        return np.repeat(of_groups, np.diff(self._ends, prepend=0), axis=-1)

    def _is_high(self, pivots: np.ndarray, num_high: int) -> np.ndarray:
        """bool [in]: the columns whose errors would cost most."""
        cost = (pivots.astype(np.float64) * np.diff(self._ends, prepend=0)[:, None]).sum(0)
        is_high = np.zeros(len(cost), bool)
        is_high[np.argsort(-cost, kind="stable")[:num_high]] = True
        return is_high

    def _scales(self, deviations: np.ndarray) -> "_Scales":
        """The stored form of the rows' deviations [places]."""
        if self._is_rotated:
            return _Scales(
                np.float32(max(np.sqrt(np.square(deviations).mean()), _LEAST_SCALE)), None
            )
        largest = np.float32(max(deviations.max(), _LEAST_SCALE))
        below = -ROW_STEPS * np.log2(np.maximum(deviations / largest, _LEAST_SCALE))
        return _Scales(largest, below.round().clip(0, 255).astype(np.uint8))

    def _fitted(
        self,
        values: np.ndarray,
        weighed: np.ndarray,
        scales: "_Scales",
        metric: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> "_Scales":
        """The scales at which these values [in, places] cost least; `weighed` is L^T times the aims
        less the values."""
        ratios, pivots, ridges = metric
        mine = np.empty_like(values)
        weigh(ratios, self._ends, values, mine)
        sums = np.zeros((2, values.shape[1]))
        damped = self._by_place(ridges)
        for first in range(0, len(values), _FITTED_TOGETHER):
            part = slice(first, first + _FITTED_TOGETHER)
            own = self._by_place(pivots.T[part]).astype(np.float64) * mine[part]
            sums[0] += (own * (mine[part] + weighed[part])).sum(0)
            sums[1] += (own * mine[part] - damped * values[part] ** 2).sum(0)
        sums = sums.sum(1, keepdims=True) if self._is_rotated else sums
        factors = np.divide(sums[0], sums[1], out=np.ones_like(sums[0]), where=sums[1] > 0)
        return self._scales(scales.deviations(self._num_outputs) * factors.clip(*_FIT))

    def _stored(
        self,
        paths: np.ndarray,
        half_bits: int,
        is_high: np.ndarray,
        scales: "_Scales",
        state_bits: int,
    ) -> Trellis:
        """Assemble the matrix; `paths` [in, rows] and `is_high` [in] are in the order of coding."""
        places = np.argsort(self._inputs)
        paths = paths[places]
        is_high = is_high[places]
        words = [pack(paths[is_high == more].T, half_bits + more).ravel() for more in (False, True)]
        rows = (
            None if scales.rows is None else torch.from_numpy(scales.rows[np.argsort(self._order)])
        )
        return Trellis(
            half_bits,
            state_bits,
            self._num_outputs,
            codes=torch.from_numpy(np.concatenate(words)),
            high=torch.from_numpy(np.packbits(is_high, bitorder="little")),
            scale=torch.tensor([scales.scale]),
            row_scales=rows,
            num_inputs=len(places),
        )


@dataclass(frozen=True, slots=True)
class _Scales:
    """The scale of a matrix, and the scales of its rows uint8 [places], as they are stored."""

    scale: np.float32
    rows: np.ndarray | None

    def deviations(self, num_outputs: int) -> np.ndarray:
        """float32 [places]."""
        return self.scale * (
            np.ones(num_outputs, np.float32) if self.rows is None else row_factors()[self.rows]
        )


@dataclass(frozen=True, slots=True)
class _Coded:
    """Arrays that `code_columns` writes."""

    paths: np.ndarray
    errors: np.ndarray
    energies: np.ndarray
    weighed: np.ndarray


@cache
def _levels() -> np.ndarray:
    """float32 [9, 2, 64]: what hashes stand for, by half bits and by even and odd rows."""
    return steps()[:, None, None] * tables().astype(np.float32)


@cache
def _hashes(state_bits: int) -> np.ndarray:
    """uint16 [states]."""
    return hashes(np.arange(2**state_bits), state_bits).astype(np.uint16)


def _normal(hessians: np.ndarray, damp: float) -> np.ndarray:
    """Hessians float32 [G, in, in], damped, with a mean diagonal of 1."""
    sizes = hessians.diagonal(axis1=1, axis2=2).astype(np.float64).mean(1)
    mean = sizes.mean() or 1.0
    moments = np.divide(
        hessians, mean, out=np.empty(hessians.shape, np.float32), casting="same_kind"
    )
    ridges = (damp * sizes / mean + _LEAST_DAMP).astype(np.float32)
    np.einsum("gii->gi", moments)[:] += ridges[:, None]
    return moments
