"""A whole expert on several tokens by compiled code is what the module computes, at every number of
tokens."""

import pytest
import torch
from torch.nn import functional as F

from runtime.kernels.load import AS_NUMPY, kernels

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 15])
@pytest.mark.parametrize(("hidden", "neurons"), [(32, 64), (160, 96)])
def test_tokens_equal_those_of_the_module(
    count: int, hidden: int, neurons: int, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(count)
    shapes = (count, hidden), (2 * neurons, hidden), (hidden, neurons)
    x, gate_up, down = ((torch.randn(shape, generator=random) / 8).to(dtype) for shape in shapes)
    gate, up = F.linear(x.float(), gate_up.float()).to(dtype).chunk(2, dim=-1)
    expected = F.linear((F.silu(gate) * up).float(), down.float()).to(dtype)
    out = torch.full_like(x, torch.nan)
    addresses = gate_up.data_ptr(), down.data_ptr()
    own = [each.view(AS_NUMPY[dtype]).numpy() for each in (x, out)]
    kernels("cpu.several_tokens").compute_whole(*addresses, neurons, *own)
    assert (out - expected).abs().max() <= 1.3 * torch.finfo(dtype).eps * expected.abs().max()
    assert (out == expected).float().mean() > 0.9, (
        "but for a rounding border, bits are those of sums in float32"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_token_does_not_depend_on_those_beside_it(dtype: torch.dtype) -> None:
    """To the bit, wherever it stands among how many."""
    random = torch.Generator().manual_seed(0)
    hidden, neurons = (160, 96)
    shapes = (16, hidden), (2 * neurons, hidden), (hidden, neurons)
    x, gate_up, down = ((torch.randn(shape, generator=random) / 8).to(dtype) for shape in shapes)

    def computed(tokens: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(tokens, torch.nan)
        own = [each.view(AS_NUMPY[dtype]).numpy() for each in (tokens, out)]
        kernels("cpu.several_tokens").compute_whole(
            gate_up.data_ptr(), down.data_ptr(), neurons, *own
        )
        return out

    whole = computed(x)
    for count in range(1, 16):
        assert torch.equal(computed(x[:count].clone()), whole[:count])
        assert torch.equal(computed(x[count:].clone()), whole[count:])
