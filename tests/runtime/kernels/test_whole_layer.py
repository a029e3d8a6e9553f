"""A layer's experts in one call agree with experts that are computed and added up by calls of their own."""

import numpy as np
import pytest
import torch

from runtime.kernels.load import AS_NUMPY, kernels

_HIDDEN, _NEURONS, _NUM_EXPERTS = 70, 33, 5


@pytest.mark.parametrize("are_wide", [False, True], ids=["weights of the dtype", "float32 weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_call_for_all_agrees_with_calls_for_each(dtype: torch.dtype, are_wide: bool) -> None:
    random = torch.Generator().manual_seed(0)
    experts = torch.randn(_NUM_EXPERTS, 3 * _NEURONS * _HIDDEN, generator=random).to(dtype) / 8
    x, like = torch.randn(1, _HIDDEN, generator=random).to(dtype), torch.empty(0, dtype=AS_NUMPY[dtype]).numpy()
    ids, weights = (
        torch.tensor([[3, 0, 3, 1]]),
        torch.rand(1, 4, generator=random).to(torch.float32 if are_wide else dtype),
    )
    starts, down = np.array([expert.data_ptr() for expert in experts]), 2 * _NEURONS * _HIDDEN * dtype.itemsize
    out, expected = torch.empty_like(x), torch.empty_like(x)

    def compute() -> bool:
        places = x.data_ptr(), ids.data_ptr(), weights.data_ptr(), are_wide, out.data_ptr()
        return kernels("cpu.whole_layer").compute_layer(starts, (0, down), (_HIDDEN, _NEURONS, 4), *places, like)

    order, selected = ids[0].argsort(stable=True).numpy(), ids.numpy()[0]
    addresses, y = (
        np.stack([starts[selected[order]], starts[selected[order]] + down], axis=1),
        np.zeros((4, _HIDDEN), np.float32),
    )
    kernels("cpu.gated").add_whole(addresses, _NEURONS, x.float().numpy()[0], np.arange(4), y, like)
    given = weights.float().numpy()[0, order]
    kernels("cpu.gated").combine(y, given, 4, expected.view(AS_NUMPY[dtype]).numpy()[0])
    bound = 1e-6 if dtype is torch.float32 else 2**-7
    assert compute() and (out - expected).abs().max() <= bound * expected.abs().max()
    for absent in (0, 3):
        starts[absent], present = 0, starts[absent]
        assert not compute(), absent
        starts[absent] = present
    starts[4] = 0  # which the token does not use
    assert compute()
    ids[0, 1] = _NUM_EXPERTS
    assert not compute()
