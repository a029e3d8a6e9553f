"""Numbers as ggml's blocks: the bytes of the package `gguf`, within half a step of the numbers."""

import gguf
import pytest
import torch

from artifacts.formats.gguf import ggml_encoding
from artifacts.formats.gguf.ggml import GGML
from artifacts.formats.gguf.ggml_encoding import encode

STEPS = {"Q8_0": 127, "Q4_0": 8}  # of the largest number of a block


@pytest.fixture
def matrix() -> torch.Tensor:
    """Numbers of many sizes; a block of zeros, one of equal numbers, one with a single number."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.randint(-6, 6, (37, 96), generator=random).float().exp2()
    drawn = torch.randn(37, 96, generator=random) * sizes
    drawn[0, :32] = 0
    drawn[1, 32:64] = -0.3
    drawn[2, 64:] = 0
    drawn[2, 70] = 5.0
    return drawn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", STEPS)
def test_the_bytes_are_those_of_the_package(
    name: str, dtype: torch.dtype, matrix: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = matrix.to(dtype)
    theirs = gguf.quants.quantize(matrix.float().numpy(), gguf.GGMLQuantizationType[name])
    assert torch.equal(encode(matrix, GGML[name]), torch.from_numpy(theirs))
    monkeypatch.setattr(ggml_encoding, "_PANEL", 5 * 96)  # several panels, the last one cut off
    assert torch.equal(encode(matrix, GGML[name]), torch.from_numpy(theirs))


@pytest.mark.parametrize("name", STEPS)
def test_no_number_moves_by_more_than_a_step(name: str, matrix: torch.Tensor) -> None:
    """Half a step by rounding; Q4_0 cuts the number opposite to its largest by up to a whole
    one."""
    blocks = encode(matrix, GGML[name])
    moved = (GGML[name].dequantise({"blocks": blocks}) - matrix).unflatten(1, (-1, 32)).abs()
    step = matrix.unflatten(1, (-1, 32)).abs().amax(-1) / STEPS[name]
    most = {"Q8_0": 0.5, "Q4_0": 1.0}[name]
    assert (moved.amax(-1) <= most * step * 1.07).all()  # scales are rounded to float16
    assert (moved[0, 0] == 0).all() and GGML[name].fault({"blocks": blocks}) is None


@pytest.mark.parametrize("name", STEPS)
def test_numbers_beyond_a_scale_of_float16_are_not_sound(name: str) -> None:
    assert GGML[name].fault({"blocks": encode(torch.full((1, 32), 1e7), GGML[name])})
