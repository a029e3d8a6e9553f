"""The column loop of GPTQ: codes of one matrix at several widths, from one factor of its Hessian.

Everything is transposed, [in, ...], with inputs in the order of a Metric and visited from the last
to the first. With R the lower triangular factor of the damped Hessian, an error D [rows, in] costs
|D R|^2, and column j of D R depends only on the errors of inputs j and later. So each weight in
turn is moved by the amount that makes its column zero, and then rounded (nearest plane). That is
GPTQ's update, without the inverse of the Hessian and its second factor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from artifacts.quantisation.grids import divisor, nearest, plain_grid, tie, top_code, weighted_grid

# Within so many columns errors are corrected one by one, beyond them by matrix products.
_LEAF = 16


@dataclass(frozen=True, slots=True)
class Metric:
    """The cost of errors: `hessian` [in, in] damped, with its inputs in `order` [in], and its lower
    factor `root`."""

    order: torch.Tensor
    hessian: torch.Tensor
    root: torch.Tensor

    @classmethod
    def of(
        cls, hessian: torch.Tensor, order: torch.Tensor, *, ridge: torch.Tensor, dtype: torch.dtype
    ) -> "Metric | None":
        """Add `ridge` [in] to the diagonal and factorise; None where even then there is no
        factor."""
        damped = hessian[order[:, None], order].to(dtype)
        damped.diagonal().add_(ridge[order])
        root, failed = torch.linalg.cholesky_ex(damped)
        return None if failed or not root.isfinite().all() else cls(order, damped, root)


def plain_order(diagonal: torch.Tensor) -> torch.Tensor:
    """Visit inputs as they are stored."""
    return torch.arange(len(diagonal), device=diagonal.device).flip(0)


def activation_order(diagonal: torch.Tensor, group_size: int) -> torch.Tensor:
    """Visit inputs by falling activation: groups by their sum, inputs within their group, so that
    no group is split."""
    groups = diagonal.view(-1, group_size)
    starts = torch.arange(0, len(diagonal), group_size, device=diagonal.device)
    inner = groups.argsort(dim=1, stable=True) + starts[:, None]
    return inner[groups.sum(1).argsort(dim=0, stable=True)].flatten()


@dataclass(frozen=True, slots=True)
class Solution:
    """Results in a Metric's order: `levels` [in, widths, rows]; `scales` and `zeros` [groups,
    widths, rows], unrounded."""

    levels: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor


class ColumnLoop:
    """One run over the columns of weights [in, rows], for all widths at once; `bits` ascend."""

    def __init__(
        self,
        metric: Metric,
        weights: torch.Tensor,
        bits: Sequence[int],
        *,
        group_size: int,
        is_refined: bool,
    ) -> None:
        num_inputs, num_rows = weights.shape
        self._metric = metric
        self._weights = weights
        self._bits = tuple(bits)
        self._group_size = group_size
        self._is_refined = is_refined
        self._levels, self._errors = weights.new_empty(2, num_inputs, len(self._bits), num_rows)
        self._wanted = torch.zeros_like(self._levels)
        self._scales, self._zeros = weights.new_empty(
            2, num_inputs // group_size, len(self._bits), num_rows
        )
        self._ties = weights.new_tensor([tie(width) for width in bits])[:, None]
        self._tops = weights.new_tensor([top_code(width) for width in bits])[:, None]
        self._pivots = metric.root.diagonal().tolist()
        self._grid: tuple[torch.Tensor, ...] = ()
        self._from_others = self._wanted[
            :0
        ]  # for the current group: corrections from the groups before it

    def run(self) -> Solution:
        self._visit(0, len(self._weights))
        return Solution(self._levels, self._scales, self._zeros)

    def _visit(self, first: int, end: int) -> None:
        """Visit the later half of the columns, then the earlier one; groups are split only within
        themselves."""
        size = end - first
        group_size = self._group_size
        if size <= min(_LEAF, group_size):
            for column in range(end - 1, first - 1, -1):
                self._round_column(column, end)
            return
        middle = first + (size // group_size // 2 * group_size if size > group_size else size // 2)
        self._visit(middle, end)
        root = self._metric.root[middle:end, first:middle]
        self._wanted[first:middle].flatten(1).addmm_(root.T, self._errors[middle:end].flatten(1))
        self._visit(first, middle)

    def _round_column(self, column: int, end: int) -> None:
        if (column + 1) % self._group_size == 0:
            self._choose_grid(column // self._group_size)
        wanted = self._wanted[column]
        if column + 1 < end:
            errors = self._errors[column + 1 : end].flatten(1)
            wanted.view(-1).addmv_(errors.T, self._metric.root[column + 1 : end, column])
        scale, low, high = self._grid
        moved = torch.add(self._weights[column], wanted, alpha=1 / self._pivots[column])
        self._levels[column] = levels = nearest(moved, scale, low, high, self._ties)
        torch.addcmul(self._weights[column], levels, scale, value=-1, out=self._errors[column])
        if self._is_refined and column % self._group_size == 0:
            self._refit_scale(column // self._group_size)

    def _choose_grid(self, group: int) -> None:
        """Choose the grid from the group's weights as they would be moved if none of them were
        rounded."""
        part = slice(group * self._group_size, (group + 1) * self._group_size)
        root = self._metric.root[part, part]
        weights = self._weights[part, None].expand_as(self._wanted[part])
        self._from_others = self._wanted[part].clone()
        if part.stop < len(self._weights):
            inverse = torch.linalg.solve_triangular(
                root, torch.eye(len(root)).to(root), upper=False
            )
            weights = weights + (inverse.T @ self._wanted[part].flatten(1)).view_as(weights)
        cost = root.diagonal().square()
        grid = (
            weighted_grid(weights, cost, self._bits)
            if self._is_refined
            else plain_grid(weights, self._bits)
        )
        scales, zeros = self._scales[group], self._zeros[group] = grid
        self._grid = (divisor(scales), -zeros, self._tops - zeros)

    def _refit_scale(self, group: int) -> None:
        """Set the scale at which the group's codes, now known, cost least, before its errors pass
        on."""
        part = slice(group * self._group_size, (group + 1) * self._group_size)
        root = self._metric.root[part, part]
        levels = self._levels[part]
        moved_by = (root.T @ levels.flatten(1)).view_as(levels)
        wanted = (root.T @ self._weights[part])[:, None] + self._from_others
        best = (moved_by * wanted).sum(0) / moved_by.square().sum(0)
        scale = torch.where((best > 0) & best.isfinite(), best, self._scales[group])
        self._scales[group] = scale
        torch.addcmul(self._weights[part, None], levels, scale, value=-1, out=self._errors[part])


def refit(
    metric: Metric, weights: torch.Tensor, products: torch.Tensor, solution: Solution
) -> torch.Tensor:
    """Scales [groups, widths, rows] at which the levels cost least: each row's least squares over
    its groups.

    `weights` and `products` (the Hessian times the weights) are [in, rows]. A row in which some
    scale would not stay positive keeps all its scales.
    """
    scales = solution.scales
    num_groups = len(scales)
    group_size = len(weights) // len(scales)
    levels = solution.levels.flatten(1)
    normal = levels.new_zeros(num_groups, num_groups, levels.shape[1])
    for group in range(num_groups):
        start = group * group_size
        end = (group + 1) * group_size
        pairs = (metric.hessian[:end, start:end] @ levels[start:end]).mul_(levels[:end])
        normal[group, : group + 1] = pairs.view(group + 1, group_size, -1).sum(1)
    wanted = (solution.levels * products[:, None]).view(num_groups, group_size, -1).sum(1)
    best = _least_squares(normal.permute(2, 0, 1), wanted.T).T.reshape(scales.shape)
    is_sound = ((best > 0) & best.isfinite()).all(0)
    return torch.where(is_sound, best, scales)


def _least_squares(normal: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """[rows, groups] of matrices [rows, groups, groups] (their lower half); not finite where they
    are singular."""
    factor, _ = torch.linalg.cholesky_ex(normal)
    return torch.cholesky_solve(wanted[..., None], factor)[..., 0]
