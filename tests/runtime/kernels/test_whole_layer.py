"""A layer's experts in one call agree with experts that are computed and added up by calls of their
own."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from artifacts.formats.gguf.ggml import GGML, GgmlBlocks
from artifacts.formats.gguf.ggml_encoding import encode
from runtime.kernels.cpu.linear import PLAIN
from runtime.kernels.cpu.row_shares import RowShares, plain_rows
from runtime.kernels.load import AS_NUMPY, kernels
from tools.gpu.checks.trellis import random_trellis

_HIDDEN = 70
_NEURONS = 33
_NUM_EXPERTS = 5
_CODED = (64, 48)
_IN_BLOCKS = (160, 64)  # the same, of experts in blocks of 32


def _by_matrices(dtype: torch.dtype, hidden: int, neurons: int) -> RowShares:
    """Experts of plain numbers, down behind gate and up."""
    inner = plain_rows(dtype, 0, 2 * neurons, hidden * dtype.itemsize)
    down = plain_rows(
        dtype, 2 * neurons * hidden * dtype.itemsize, hidden, neurons * dtype.itemsize
    )
    return RowShares([inner], [down], dtype)


@pytest.mark.parametrize("are_wide", [False, True], ids=["weights of the dtype", "float32 weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_call_for_all_agrees_with_calls_for_each(dtype: torch.dtype, are_wide: bool) -> None:
    random = torch.Generator().manual_seed(0)
    experts = torch.randn(_NUM_EXPERTS, 3 * _NEURONS * _HIDDEN, generator=random).to(dtype) / 8
    x = torch.randn(1, _HIDDEN, generator=random).to(dtype)
    like = _like(dtype)
    ids = torch.tensor([[3, 0, 3, 1]])
    weights = torch.rand(1, 4, generator=random).to(torch.float32 if are_wide else dtype)
    starts = np.array([expert.data_ptr() for expert in experts])
    down = 2 * _NEURONS * _HIDDEN * dtype.itemsize
    out = torch.empty_like(x)
    expected = torch.empty_like(x)

    def compute() -> bool:
        places = 1, x.data_ptr(), ids.data_ptr(), weights.data_ptr(), are_wide, out.data_ptr()
        return kernels("cpu.whole_layer").compute_layer(
            starts,
            tuple((PLAIN, at) for at in (0, 0, down)),
            (_HIDDEN, _NEURONS, 4),
            _none(),
            *places,
            like,
        )

    order = ids[0].argsort(stable=True).numpy()
    selected = ids.numpy()[0]
    y = np.zeros((4, _HIDDEN), np.float32)
    each = _by_matrices(dtype, _HIDDEN, _NEURONS)
    each.multiply(starts[selected[order]], np.arange(4), x.float().numpy()[0], y)
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
    random = torch.Generator().manual_seed(0)
    hidden, neurons = _IN_BLOCKS
    like = _like(dtype)
    shapes = [
        ("Q4_0", (neurons, hidden)),
        ("Q8_0", (neurons, hidden)),
        ("Q4_0", (hidden, neurons)),
    ]  # gate, up, down
    experts = [
        [_in_blocks(torch.randn(shape, generator=random) / 8, GGML[name]) for name, shape in shapes]
        for _ in range(_NUM_EXPERTS)
    ]
    whole = [torch.cat([blocks.flatten() for blocks, _ in matrices]) for matrices in experts]
    places = [0, *accumulate(blocks.nbytes for blocks, _ in experts[0])]
    matrices = tuple(
        (getattr(kernels("cpu.published.published"), name), at)
        for (name, _), at in zip(shapes, places, strict=False)
    )
    x = torch.randn(1, hidden, generator=random).to(dtype)
    ids = torch.tensor([[2, 4, 0]])
    weights = torch.tensor([[0.5, 0.25, 0.125]])
    out = torch.empty_like(x)
    starts = np.array([expert.data_ptr() for expert in whole])
    sizes = (hidden, neurons, 3)
    given = 1, x.data_ptr(), ids.data_ptr(), weights.data_ptr(), True, out.data_ptr()
    assert kernels("cpu.whole_layer").compute_layer(starts, matrices, sizes, _none(), *given, like)

    expected = torch.zeros(1, hidden)
    for expert, weight in zip(ids[0], weights[0], strict=True):
        gate, up, down = (numbers for _, numbers in experts[expert])
        acts = F.silu((x.float() @ gate.T).to(dtype)) * (x.float() @ up.T).to(dtype)
        expected += weight * (acts.float() @ down.T)
    assert (out - expected).abs().max() <= (
        1e-5 if dtype is torch.float32 else 2**-6
    ) * expected.abs().max()


def _in_blocks(matrix: torch.Tensor, form: GgmlBlocks) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in blocks, and its numbers there."""
    blocks = encode(matrix, form)
    return blocks, form.dequantise({"blocks": blocks})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_experts_without_an_address_are_their_replicas(dtype: torch.dtype) -> None:
    """Beside one that has an address; to the bit where numbers are rounded to 16 bits."""
    hidden, neurons = _CODED
    like = _like(dtype)
    random = torch.Generator().manual_seed(0)
    rotations = kernels("cpu.replicas.rotation").rotation
    outer = rotations(hidden, is_back=False)
    back = rotations(hidden, is_back=True)
    acts = rotations(neurons, is_back=False)
    digits = kernels("cpu.replicas.trellis").num_digits(dtype)
    turns = outer.signs, acts.signs, outer.odd, back.odd, acts.odd, digits
    pairs = [
        (
            random_trellis(2 * neurons, hidden, h, 16, is_rotated=False, seed=h),
            random_trellis(hidden, neurons, h, 16),
        )
        for h in range(1, 1 + _NUM_EXPERTS)
    ]
    of = kernels("cpu.replicas.trellis")
    tables = [
        np.array([[take(own) for own in pair] for pair in pairs])
        for take in (of.addresses_of, of.sizes_of)
    ]
    functions = kernels("cpu.replicas.trellis_vectors").functions()
    whole = torch.randn(3 * neurons * hidden, generator=random).to(dtype) / 8
    x = torch.randn(1, hidden, generator=random).to(dtype)
    ids = torch.tensor([[4, 0, 2]])
    weights = torch.rand(1, 3)
    starts = np.zeros(_NUM_EXPERTS, np.int64)
    down = 2 * neurons * hidden * dtype.itemsize
    out = torch.empty_like(x)
    starts[2] = whole.data_ptr()
    matrices = tuple((PLAIN, at) for at in (0, 0, down))
    given = 1, x.data_ptr(), ids.data_ptr(), weights.data_ptr(), True, out.data_ptr()
    replicas = functions, *tables, turns
    assert kernels("cpu.whole_layer").compute_layer(
        starts, matrices, (hidden, neurons, 3), replicas, *given, like
    )

    y = np.zeros((3, hidden), np.float32)
    token = x.float().numpy()[0]
    expected = torch.empty_like(x)
    own = [np.ascontiguousarray(table[[0, 4]]) for table in tables]
    kernels("cpu.replicas.gated_trellis").add(
        functions, *own, turns, token, np.array([0, 2]), y, like
    )
    _by_matrices(dtype, hidden, neurons).multiply([starts[2]], [1], token, y)
    kernels("cpu.gated").combine(
        y, weights.numpy()[0, [1, 2, 0]], 3, expected.view(AS_NUMPY[dtype]).numpy()[0]
    )
    bound = 1e-6 * expected.abs().max() if dtype is torch.float32 else 0
    assert (out - expected).abs().max() <= bound and expected.abs().max() > 0


def _none() -> tuple:
    """The replicas of a layer that has none."""
    functions, addresses, sizes, rotations = kernels("cpu.whole_layer").no_replicas(1)
    return functions, addresses[0], sizes[0], rotations


def _like(dtype: torch.dtype) -> np.ndarray:
    return torch.empty(0, dtype=AS_NUMPY[dtype]).numpy()
