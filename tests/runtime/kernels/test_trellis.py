"""Products with trellis codes agree with the oracle at every rate, shape, dtype and number of
tokens."""

import numpy as np
import pytest
import torch

from artifacts.quantisation.trellis.rotation import rotate, rotate_back
from artifacts.quantisation.trellis.trellis import HALF_BITS, Trellis
from runtime.kernels.trellis import kernel_name, linear
from tools.gpu.checks.trellis import random_trellis

# out, in, half bits, columns with half a bit more, whether outputs are rotated: sizes that are no
# multiple of a block of rows or of a vector of columns, one kind of columns alone, odd factors.
CASES = [
    *((96, 72, half_bits, 16, half_bits % 2 == 0) for half_bits in HALF_BITS[:-1]),
    (33, 40, 8, 0, True),
    (100, 256, 2, 0, False),
    (64, 48, 3, 48, True),
    (1, 16, 4, 0, False),
    (34, 8704, 1, 32, False),  # more columns than sums of whole numbers take
]
MANY_TOKENS = 64
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def tokens(count: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_equal_those_with_the_oracle(
    case: tuple[int, int, int, int, bool], dtype: torch.dtype
) -> None:
    num_outputs, num_inputs, half_bits, num_high, is_rotated = case
    trellis = random_trellis(num_outputs, num_inputs, half_bits, num_high, is_rotated=is_rotated)
    weights = trellis.dequantised()
    for count in (1, 3, MANY_TOKENS):
        x = tokens(count, num_inputs, dtype)
        y = linear(x, trellis)
        assert y.dtype is dtype
        assert relative(y, x.double() @ weights.double().mT) < ALLOWED[dtype]


def test_a_tokens_sums_do_not_depend_on_the_other_tokens() -> None:
    trellis = random_trellis(64, 96, 3, 16)
    x = tokens(7, 96, torch.bfloat16)
    together = linear(x, trellis)
    assert all(torch.equal(linear(x[t : t + 1], trellis)[0], together[t]) for t in range(len(x)))


def test_a_token_that_is_no_number_spoils_itself_alone() -> None:
    x = tokens(2, 96, torch.float32)
    x[0, 5] = torch.nan
    y = linear(x, random_trellis(32, 96, 4))
    assert y[0].isnan().all() and y[1].isfinite().all()


@pytest.mark.parametrize("length", [1, 8, 24, 96, 45 * 64, 2048])
def test_compiled_rotations_are_those_of_the_format(length: int) -> None:
    from runtime.kernels.cpu.replicas import rotation as compiled

    x = np.random.default_rng(0).standard_normal((3, length)).astype(np.float32)
    for ours, theirs, is_back in (
        (compiled.rotate, rotate, False),
        (compiled.rotate_back, rotate_back, True),
    ):
        out = np.empty_like(x)
        ours(x, *compiled.rotation(length, is_back=is_back), out)
        np.testing.assert_allclose(out, theirs(x), atol=3e-6)


def gated(inner: Trellis, down: Trellis, x: torch.Tensor) -> torch.Tensor:
    """A gated expert in float64."""
    gate, up = (x.double() @ inner.dequantised().double().mT).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ down.dequantised().double().mT


@pytest.mark.parametrize(
    ("dtype", "like"), [(torch.float32, np.float32), (torch.bfloat16, np.uint16)]
)
def test_experts_of_several_rates_are_one_call(dtype: torch.dtype, like: type) -> None:
    from runtime.kernels.cpu.replicas.gated_trellis import add
    from runtime.kernels.cpu.replicas.rotation import rotation
    from runtime.kernels.cpu.replicas.trellis import addresses_of, num_digits, sizes_of
    from runtime.kernels.cpu.replicas.trellis_vectors import functions

    experts = [
        (
            random_trellis(96, 64, h, 16, is_rotated=False, seed=h),
            random_trellis(64, 48, h, 16, seed=h),
        )
        for h in (1, 2, 5)
    ]
    addresses, sizes = (
        np.array([[of(part) for part in pair] for pair in experts])
        for of in (addresses_of, sizes_of)
    )
    outer = rotation(64, is_back=False)
    back = rotation(64, is_back=True)
    inner = rotation(48, is_back=False)
    x = tokens(1, 64, dtype)[0]
    y = np.zeros((3, 64), np.float32)
    rotations = outer.signs, inner.signs, outer.odd, back.odd, inner.odd, num_digits(dtype)
    operands = x.float().numpy(), np.array([2, 0, 1]), y, np.empty(0, like)
    add(functions(), addresses, sizes, rotations, *operands)
    for row, pair in zip((2, 0, 1), experts, strict=True):
        assert relative(torch.from_numpy(y[row]), gated(*pair, x)) < ALLOWED[dtype]


def test_the_receipt_names_the_kernel() -> None:
    assert kernel_name(torch.device("cpu")) == f"numba, unpacked from {MANY_TOKENS} tokens on"
