"""A layer's experts in one call agree with experts that are computed and added up by calls of their own."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from artifacts.formats.ggml import GGML, GgmlBlocks
from artifacts.formats.ggml_encoding import encode
from runtime.kernels.cpu.linear import PLAIN
from runtime.kernels.load import AS_NUMPY, kernels

_HIDDEN, _NEURONS, _NUM_EXPERTS = 70, 33, 5
_IN_BLOCKS = (160, 64)  # the same, of experts in blocks of 32


@pytest.mark.parametrize("are_wide", [False, True], ids=["weights of the dtype", "float32 weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_call_for_all_agrees_with_calls_for_each(dtype: torch.dtype, are_wide: bool) -> None:
    random = torch.Generator().manual_seed(0)
    experts = torch.randn(_NUM_EXPERTS, 3 * _NEURONS * _HIDDEN, generator=random).to(dtype) / 8
    x, like = torch.randn(1, _HIDDEN, generator=random).to(dtype), _like(dtype)
    ids, weights = (
        torch.tensor([[3, 0, 3, 1]]),
        torch.rand(1, 4, generator=random).to(torch.float32 if are_wide else dtype),
    )
    starts, down = np.array([expert.data_ptr() for expert in experts]), 2 * _NEURONS * _HIDDEN * dtype.itemsize
    out, expected = torch.empty_like(x), torch.empty_like(x)

    def compute() -> bool:
        places = x.data_ptr(), ids.data_ptr(), weights.data_ptr(), are_wide, out.data_ptr()
        return kernels("cpu.whole_layer").compute_layer(
            starts, tuple((PLAIN, at) for at in (0, 0, down)), (_HIDDEN, _NEURONS, 4), *places, like
        )

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_experts_in_blocks_of_32_agree_with_products_of_their_matrices(dtype: torch.dtype) -> None:
    random, (hidden, neurons), like = torch.Generator().manual_seed(0), _IN_BLOCKS, _like(dtype)
    shapes = [("Q4_0", (neurons, hidden)), ("Q8_0", (neurons, hidden)), ("Q4_0", (hidden, neurons))]  # gate, up, down
    experts = [
        [_in_blocks(torch.randn(shape, generator=random) / 8, GGML[name]) for name, shape in shapes]
        for _ in range(_NUM_EXPERTS)
    ]
    whole = [torch.cat([blocks.flatten() for blocks, _ in matrices]) for matrices in experts]
    places = [0, *accumulate(blocks.nbytes for blocks, _ in experts[0])]
    matrices = tuple(
        (getattr(kernels("cpu.published"), name), at) for (name, _), at in zip(shapes, places, strict=False)
    )
    x, ids = torch.randn(1, hidden, generator=random).to(dtype), torch.tensor([[2, 4, 0]])
    weights, out = torch.tensor([[0.5, 0.25, 0.125]]), torch.empty_like(x)
    starts, sizes = np.array([expert.data_ptr() for expert in whole]), (hidden, neurons, 3)
    given = x.data_ptr(), ids.data_ptr(), weights.data_ptr(), True, out.data_ptr()
    assert kernels("cpu.whole_layer").compute_layer(starts, matrices, sizes, *given, like)

    expected = torch.zeros(1, hidden)
    for expert, weight in zip(ids[0], weights[0], strict=True):
        gate, up, down = (numbers for _, numbers in experts[expert])
        acts = F.silu((x.float() @ gate.T).to(dtype)) * (x.float() @ up.T).to(dtype)
        expected += weight * (acts.float() @ down.T)
    assert (out - expected).abs().max() <= (1e-5 if dtype is torch.float32 else 2**-6) * expected.abs().max()


def _in_blocks(matrix: torch.Tensor, form: GgmlBlocks) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in blocks, and its numbers there."""
    blocks = encode(matrix, form)
    return blocks, form.dequantise({"blocks": blocks})


def _like(dtype: torch.dtype) -> np.ndarray:
    return torch.empty(0, dtype=AS_NUMPY[dtype]).numpy()
