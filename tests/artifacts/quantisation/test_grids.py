"""Grids of groups: plain grids exactly, weighted grids never worse by their own cost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.quantisation.grids import divisor, nearest, plain_grid, tie, top_code, weighted_grid
from artifacts.quantisation.widths import SCALAR_WIDTHS


def rounded(
    weights: torch.Tensor, grid: tuple[torch.Tensor, torch.Tensor], bits: int
) -> torch.Tensor:
    scale, zero = (part[0] for part in grid)
    return scale * nearest(weights, divisor(scale), -zero, top_code(bits) - zero, tie(bits))


def test_a_plain_grid_spans_the_range_and_nought() -> None:
    weights = torch.tensor([[-1.0, 1.0, -2.0, 0.0], [2.0, 3.0, -1.0, 0.0]])
    scale, zero = (part[0] for part in plain_grid(weights[:, None], [2]))
    assert scale.tolist() == pytest.approx([1, 1, 2 / 3, 2 / 3]) and zero.tolist() == [1, 0, 3, 2]
    scale, zero = (part[0] for part in plain_grid(weights[:, None], [1]))
    assert scale.tolist() == [3, 4, 3, 0] and zero.tolist() == [0.5] * 4


@pytest.mark.parametrize("bits", SCALAR_WIDTHS)
def test_noughts_and_constants_are_kept(bits: int) -> None:
    weights = torch.tensor([[0.0, 0.25, -0.25]]).expand(8, 3).contiguous()
    for grid in (
        plain_grid(weights[:, None], [bits]),
        weighted_grid(weights[:, None], torch.ones(8), [bits]),
    ):
        assert torch.equal(rounded(weights, grid, bits), weights)


def test_nought_has_the_sign_plus_at_one_bit() -> None:
    weights = torch.tensor([[0.0], [-1.0], [2.0]])
    assert rounded(weights, plain_grid(weights[:, None], [1]), 1)[:, 0].tolist() == [1, -1, 1]


@given(st.integers(0, 10**6), st.sampled_from(SCALAR_WIDTHS))
@settings(max_examples=50)
def test_a_weighted_grid_costs_no_more_than_a_plain_one(seed: int, bits: int) -> None:
    random = torch.Generator().manual_seed(seed)
    weights = torch.randn(32, 6, generator=random).double()
    cost = torch.rand(32, generator=random).double() ** 4

    def price(grid: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return cost @ (weights - rounded(weights, grid, bits)).square()

    plain = plain_grid(weights[:, None], [bits])
    weighted = weighted_grid(weights[:, None], cost, [bits])
    assert (price(weighted) <= price(plain) * (1 + 1e-9)).all()
    assert (weighted[1] == weighted[1].round()).all() == (bits > 1)
