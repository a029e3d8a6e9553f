"""Hessians of groups of rows for trellis codes."""

import pytest
import torch

from profilers.quantise import trellis_calibration


@pytest.mark.parametrize("num_groups", [2, trellis_calibration._MANY_GROUPS])
@pytest.mark.parametrize("num_inputs", [32, 40])
def test_moments_of_groups_are_weighted_sums_of_products(num_groups: int, num_inputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, num_inputs, generator=generator)
    weights = torch.rand(300, num_groups, generator=generator)
    hessians = torch.ones(num_groups, num_inputs, num_inputs)
    trellis_calibration._add_moments(hessians, x, weights)
    expected = 1 + torch.einsum("ng,ni,nj->gij", weights, x, x)
    torch.testing.assert_close(hessians, expected, rtol=1e-4, atol=1e-3)
