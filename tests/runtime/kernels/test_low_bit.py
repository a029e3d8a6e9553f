"""Products with low-bit weights agree with the oracle at every width, shape, dtype and number of
tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from artifacts.quantisation.packing import Packed, pack, unpack
from artifacts.quantisation.widths import SCALAR_WIDTHS
from runtime.kernels import load, low_bit
from runtime.kernels.low_bit import MANY_TOKENS, dequantise, kernel_name, linear
from runtime.kernels.replica_linear import project_replica
from runtime.model.arithmetic import expert_forward
from runtime.model.open import open_model
from tests.conftest import Checkpoint
from tests.helpers.families import FAMILIES
from tools.gpu.checks.low_bit import random_packed

# out, in, group: sizes that are no multiple of 32 or of 32 / bits, one group per row, groups that
# end within a word.
SHAPES = [
    (64, 128, 128),
    (48, 256, 64),
    (33, 96, 32),
    (50, 24, 24),
    (7, 100, 100),
    (40, 96, 48),
    (1, 33, 11),
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def by_numba(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    # here, or every worker would compile it at collection
    from runtime.kernels.cpu.replicas import low_bit as numba_low_bit

    return numba_low_bit.dequantise(packed, dtype)


def from_codes(packed: Packed) -> np.ndarray:
    """Dequantise to [out, in] in float64, independently of the oracle."""
    codes = unpack(packed.qweight.numpy(), packed.bits, packed.num_inputs).astype(float)
    zeros = 0.5
    if packed.qzeros is not None:
        words = np.ascontiguousarray(packed.qzeros.numpy().T)
        zeros = (
            unpack(words, packed.bits, packed.num_outputs)
            .astype(float)
            .T.repeat(packed.group_size, axis=0)
        )
    scales = packed.scales.numpy().astype(float).repeat(packed.group_size, axis=0)
    return (scales * (codes - zeros)).T


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def tokens(count: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("bits", SCALAR_WIDTHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_oracle_equals_the_codes(shape: tuple[int, int, int], bits: int) -> None:
    packed = random_packed(*shape[:2], bits, shape[2])
    weights = torch.from_numpy(from_codes(packed))
    assert torch.equal(dequantise(packed).double(), weights.float().double())
    assert torch.equal(by_numba(packed, torch.float32), dequantise(packed))
    assert torch.equal(by_numba(packed, torch.bfloat16), dequantise(packed, torch.bfloat16))


@pytest.mark.parametrize("bits", SCALAR_WIDTHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_product_agrees_with_the_oracle(
    shape: tuple[int, int, int], bits: int, dtype: str
) -> None:
    packed = random_packed(*shape[:2], bits, shape[2])
    for count in (1, 2, 3, MANY_TOKENS - 1, MANY_TOKENS, 40):
        x = tokens(count, shape[1], DTYPES[dtype])
        y = linear(x, packed)
        assert y.shape == (count, shape[0]) and y.dtype == x.dtype
        assert relative(y, F.linear(x.float(), dequantise(packed))) < (
            1e-5 if dtype == "float32" else 5e-3
        )


@settings(max_examples=40)
@given(
    st.sampled_from(SCALAR_WIDTHS),
    st.integers(1, 70),
    st.integers(1, 5),
    st.integers(1, 70),
    st.integers(1, 20),
)
def test_any_shape_agrees(
    bits: int, group_size: int, num_groups: int, num_outputs: int, count: int
) -> None:
    packed = random_packed(num_outputs, group_size * num_groups, bits, group_size)
    x = tokens(count, packed.num_inputs)
    exact = F.linear(x.double(), torch.from_numpy(from_codes(packed)))
    assert (linear(x, packed) - exact).abs().max() <= 1e-5 * x.abs().sum(1).max() * dequantise(
        packed
    ).abs().max()


@pytest.mark.parametrize("bits", SCALAR_WIDTHS)
def test_a_token_does_not_depend_on_the_others(bits: int) -> None:
    packed = random_packed(96, 128, bits)
    x = tokens(MANY_TOKENS - 1, 128)
    batch = linear(x, packed)
    assert all(torch.equal(linear(x[i : i + 1], packed)[0], batch[i]) for i in range(len(x)))


@pytest.mark.parametrize("count", [1, 5, MANY_TOKENS + 4])
def test_x_may_be_strided_require_gradients_or_be_empty(count: int) -> None:
    packed = random_packed(24, 64, 3)
    x = tokens(count, 64)
    plain = linear(x, packed)
    assert torch.equal(linear(x.T.contiguous().T, packed), plain)
    assert torch.equal(linear(torch.cat((x, x), dim=1)[:, :64], packed), plain)
    assert (
        torch.equal(linear(x[:1].expand(count, -1), packed), plain[:1].expand(count, -1))
        or count >= MANY_TOKENS
    )
    assert torch.equal(linear(x.clone().requires_grad_(), packed).detach(), plain)
    assert linear(x[:0], packed).shape == (0, 24)


def test_one_bit_is_sign_times_alpha_and_zero_points_of_zero_survive() -> None:
    one = random_packed(8, 64, 1)
    assert torch.equal(
        dequantise(one).abs(), (one.scales.float() / 2).T.repeat_interleave(64, dim=1)
    )
    codes = torch.arange(64, dtype=torch.uint8).repeat(8, 1).T.numpy() % 8
    scales = torch.full((1, 8), 0.5, dtype=torch.float16)
    zeros = torch.zeros(1, 1, dtype=torch.int32)
    packed = Packed(3, 64, 64, torch.from_numpy(pack(codes, 3)), scales, zeros)
    assert torch.equal(dequantise(packed), torch.from_numpy(codes.T * np.float32(0.5)))
    assert torch.equal(linear(torch.eye(64)[:8], packed), dequantise(packed).T[:8])


def test_every_float16_scale_is_converted_exactly() -> None:
    # all finite, non-negative ones, subnormals too
    every = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16)
    scales = torch.cat((every, -every))[None]
    packed = Packed(
        1, 32, 32, torch.full((1, scales.shape[1]), -1, dtype=torch.int32), scales, None
    )
    assert torch.equal(by_numba(packed, torch.float32), (scales.float() / 2).T.expand(-1, 32))


@pytest.mark.parametrize("bits", SCALAR_WIDTHS)
def test_a_nan_affects_only_its_token(bits: int) -> None:
    packed = random_packed(40, 64, bits)
    x = tokens(3, 64)
    plain = linear(x, packed)
    x[1, 7] = torch.nan
    y = linear(x, packed)
    assert y[1].isnan().all() and torch.equal(y[[0, 2]], plain[[0, 2]])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, MANY_TOKENS])
def test_an_expert_of_every_family(checkpoint: Checkpoint, family: str, count: int) -> None:
    """Biased, transposed and interleaved experts too: equal to `expert_forward` on the dequantised
    weights."""
    opened = open_model(str(checkpoint(family)))
    module = opened.layers[-1].experts
    replica = {}
    weights = {}
    for part in opened.store.layout.parts:
        if len(part.shape) == 1:
            replica[part.name] = weights[part.name] = tokens(1, *part.shape)[0]
            continue
        out, inputs = part.shape[::-1] if module.is_transposed else part.shape
        replica[part.name] = random_packed(out, inputs, 3)
        matrix = dequantise(replica[part.name])
        weights[part.name] = (matrix.mT if module.is_transposed else matrix).contiguous()
    x = tokens(count, opened.config.hidden_size)
    with torch.inference_mode():
        ours = expert_forward(module, replica, x, project=project_replica)
        assert relative(ours, expert_forward(module, weights, x)) < 1e-5


def test_the_receipt_names_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_name(torch.device("cpu")) == f"numba, unpacked from {MANY_TOKENS} tokens on"
    monkeypatch.setattr(load, "has_triton", lambda: False)
    assert kernel_name(torch.device("cuda")) == "torch, dequantised (no triton)"


@pytest.mark.parametrize("count", [1, MANY_TOKENS])
def test_without_a_kernel_the_oracle_computes(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    packed = random_packed(24, 64, 2)
    x = tokens(count, 64)
    monkeypatch.setattr(low_bit, "_kernels", lambda device: None)
    assert torch.equal(linear(x, packed), F.linear(x, dequantise(packed)))
