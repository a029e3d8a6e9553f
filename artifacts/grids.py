"""Grids of 1 to 4 bits for a group of weights: scale and zero-point, and the levels nearest to given weights.

A level is `code - zero`, a weight its scale times its level. Groups are transposed: [inputs of the group, rows]. At 1
bit the levels are -1/2 and 1/2 (sign times alpha, the scale is 2 alpha); above, `round(zero)` codes lie below nought.
"""

import torch

SIGN_ZERO = 0.5
# Shares of the lowest and of the highest weight that a weighted grid tries to reach, before its scale is refined.
_REACHES = ((1.0, 1.0), (0.8, 0.8), (0.6, 0.6), (0.6, 1.0), (1.0, 0.6))


def top_code(bits: int) -> int:
    """The largest code."""
    return 2**bits - 1


def tie(bits: int) -> float:
    """What `nearest` needs so that 1 bit has halves for levels, and nought the sign plus."""
    return SIGN_ZERO if bits == 1 else 0.0


def nearest(
    weights: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, high: torch.Tensor, tie: torch.Tensor | float
) -> torch.Tensor:
    """Levels nearest to the weights, from `low` to `high`; ties go to the even one. Scales must not be nought."""
    return torch.clamp((weights / scale).sub_(tie).round_().add_(tie), low, high)


def plain_grid(weights: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero-point [rows] of weights [inputs, rows]: their range, nought included; at 1 bit their mean size.

    The grid of GPTQ's published code (asymmetric), and of Mixture Compressor's at 1 bit.
    """
    if bits == 1:
        return _sign_grid(2 * weights.abs().mean(0))
    low, high = _range(weights)
    return _range_grid(low, high, bits)


def weighted_grid(weights: torch.Tensor, cost: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero-point [rows] that make the squared errors of weights [inputs, rows] cost little.

    `cost` [inputs] is the price of a squared error of each input. Each range that is tried gives a zero-point; its
    scale then moves to the best one for the levels it gave, twice, and the cheapest of all is taken.
    """
    if bits == 1:
        return _sign_grid(2 * (cost @ weights.abs()) / cost.sum())
    low, high = _range(weights)
    scale, zero = _range_grid(low, high, bits)
    saved = torch.zeros_like(scale)
    cost = cost[:, None]
    priced = cost * weights
    for reach_low, reach_high in _REACHES:
        tried, tried_zero = _range_grid(reach_low * low, reach_high * high, bits)
        for _ in range(2):
            levels = nearest(weights, tried, -tried_zero, top_code(bits) - tried_zero, 0.0)
            along = torch.einsum("ir,ir->r", priced, levels)
            square = torch.einsum("ir,ir->r", levels.square(), cost.expand_as(levels))
            tried = torch.where(along > 0, along / square, tried)
        gain = torch.where(along > 0, along * along / square, saved)
        is_best = gain > saved
        saved = torch.where(is_best, gain, saved)
        scale, zero = torch.where(is_best, tried, scale), torch.where(is_best, tried_zero, zero)
    return scale, zero


def divisor(scale: torch.Tensor) -> torch.Tensor:
    """The scales, where a group of nothing but noughts has one that can be divided by."""
    return scale.clamp_min(torch.finfo(scale.dtype).tiny)


def _sign_grid(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scale, torch.full_like(scale, SIGN_ZERO)


def _range(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = weights.amin(0).clamp_(max=0), weights.amax(0).clamp_(min=0)
    is_empty = low == high
    return low.masked_fill_(is_empty, -1), high.masked_fill_(is_empty, 1)


def _range_grid(low: torch.Tensor, high: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    scale = divisor((high - low) / top_code(bits))
    return scale, (-low / scale).round_().clamp_(0, top_code(bits))
