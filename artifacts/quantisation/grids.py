"""Grids of 1 to 8 bits for a group of weights: scale and zero-point, and the levels nearest to
given weights.

A level is `code - zero`, a weight its scale times its level. Groups are transposed, with several
widths beside each other: [inputs of the group, widths, rows], the widths ascending. At 1 bit the
levels are -1/2 and 1/2 (sign times alpha; the scale is 2 alpha); above, `zero` codes lie below
zero.
"""

from collections.abc import Sequence

import torch

SIGN_ZERO = 0.5
# Shares of the lowest and of the highest weight that a weighted grid tries to cover before its
# scale is refined.
_REACHES = ((1.0, 1.0), (0.8, 0.8), (0.6, 0.6), (0.6, 1.0), (1.0, 0.6))


def top_code(bits: int) -> int:
    """The largest code."""
    return 2**bits - 1


def tie(bits: int) -> float:
    """The offset that `nearest` needs so that 1 bit has the levels -1/2 and 1/2, and zero gets the
    sign plus."""
    return SIGN_ZERO if bits == 1 else 0.0


def nearest(
    weights: torch.Tensor,
    scale: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    tie: torch.Tensor | float,
) -> torch.Tensor:
    """Levels nearest to the weights, from `low` to `high`; ties go to the even level. Scales must
    not be zero."""
    return torch.clamp((weights / scale).sub_(tie).round_().add_(tie), low, high)


def plain_grid(weights: torch.Tensor, bits: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero-points [widths, rows] from the weights' range, zero included; at 1 bit from
    their mean size.

    This is the grid of GPTQ's published code (asymmetric), and of Mixture Compressor's at 1 bit.
    """
    signs, ranged, tops = _split(weights, bits)
    return _joined(2 * signs.abs().mean(0), *_range_grid(*_range(ranged), tops))


def weighted_grid(
    weights: torch.Tensor, cost: torch.Tensor, bits: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero-points [widths, rows] at which the squared errors of the weights cost little.

    `cost` [inputs] is the price of a squared error of each input. Each range that is tried gives a
    zero-point; its scale then moves twice to the best one for the levels it gave, and the cheapest
    of all is taken.
    """
    signs, ranged, tops = _split(weights, bits)
    cost = cost / cost.max()
    # The last digits do not decide which grid is best: single precision takes half the time.
    best = (
        part.to(weights.dtype) for part in _searched(ranged.float(), cost.float(), tops.float())
    )
    return _joined(2 * torch.tensordot(cost, signs.abs(), 1) / cost.sum(), *best)


def _searched(
    weights: torch.Tensor, cost: torch.Tensor, tops: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = _range(weights)
    scale, zero = _range_grid(low, high, tops)
    saved = torch.zeros_like(scale)
    priced = cost[:, None, None] * weights
    for reach_low, reach_high in _REACHES:
        tried, tried_zero = _range_grid(reach_low * low, reach_high * high, tops)
        for _ in range(2):
            levels = (weights / tried).round_()
            levels = torch.clamp(levels, -tried_zero, tops - tried_zero, out=levels)
            along = (priced * levels).sum(0)
            square = torch.tensordot(cost, levels.square_(), 1)
            tried = torch.where(along > 0, along / square, tried)
        gain = torch.where(along > 0, along * along / square, saved)
        is_best = gain > saved
        saved = torch.where(is_best, gain, saved)
        scale = torch.where(is_best, tried, scale)
        zero = torch.where(is_best, tried_zero, zero)
    return scale, zero


def divisor(scale: torch.Tensor) -> torch.Tensor:
    """The scales, made safe to divide by: a group of zeros has the scale 0."""
    return scale.clamp_min(torch.finfo(scale.dtype).tiny)


def _split(
    weights: torch.Tensor, bits: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split off the weights of 1 bit; return them, the weights of more bits, and the top codes
    [widths, 1] of these."""
    num_signs = sum(width == 1 for width in bits)
    tops = weights.new_tensor([top_code(width) for width in bits[num_signs:]])
    return weights[:, :num_signs], weights[:, num_signs:], tops[:, None]


def _joined(
    signs: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([signs, scale]), torch.cat([torch.full_like(signs, SIGN_ZERO), zero])


def _range(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low = weights.amin(0).clamp_(max=0)
    high = weights.amax(0).clamp_(min=0)
    is_empty = low == high
    return low.masked_fill_(is_empty, -1), high.masked_fill_(is_empty, 1)


def _range_grid(
    low: torch.Tensor, high: torch.Tensor, tops: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = divisor((high - low) / tops)
    return scale, torch.minimum((-low / scale).round_(), tops)
