"""ggml's blocks: the numbers of the package `gguf`, to the bit, by the formula in torch and by the
compiled loops. Q1_0 and Q2_0, which the package does not know, are written down again here."""

import gguf
import numpy as np
import pytest
import torch

from artifacts.formats.base import Stored, Unfit
from artifacts.formats.gguf.ggml import GGML
from artifacts.formats.numbers import numbers
from tests.helpers.gguf_files import SCALES, blocks

ROWS = 5
PER_ROW = 3


def drawn(name: str) -> torch.Tensor:
    return torch.from_numpy(blocks(name, ROWS * PER_ROW)).reshape(ROWS, -1)


def bits(matrix: torch.Tensor) -> torch.Tensor:
    """The bits of the numbers, by which 0 and -0 differ."""
    return matrix.view(torch.int32)


def of_the_package(name: str, stored: torch.Tensor) -> torch.Tensor:
    """The numbers of blocks by another's formula."""
    if name not in OWN:
        kind = gguf.GGMLQuantizationType[name]
        return torch.from_numpy(gguf.quants.dequantize(stored.numpy(), kind))
    _, nbytes, weigh = OWN[name]
    blocks = stored.numpy().reshape(-1, nbytes)
    digits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return torch.from_numpy(weigh(digits.astype(np.int8), scales).reshape(len(stored), -1))


def of_one_bit(digits: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return np.where(digits == 1, scales, -scales)


def of_two_bits(digits: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return (digits[:, ::2] + 2 * digits[:, 1::2] - 1).astype(np.float32) * scales


OWN = {"Q1_0": (128, 18, of_one_bit), "Q2_0": (64, 18, of_two_bits)}


@pytest.mark.parametrize("name", GGML)
def test_numbers_of_any_bytes_are_those_of_the_package(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    stored = torch.randint(0, 256, (64, 4 * GGML[name].nbytes), dtype=torch.uint8, generator=random)
    # the upper bits of the exponents of a scale and a minimum, which may also be any other bits
    places = {"IQ1_M": 55, "MXFP4": 0}.get(name, SCALES.get(name, 0) + 1)
    stored.view(-1, GGML[name].nbytes)[:, places : places + 3 : 2] &= 0xBF
    theirs = of_the_package(name, stored)
    assert theirs.isfinite().all()
    assert torch.equal(bits(GGML[name].dequantise({"blocks": stored})), bits(theirs))


@pytest.mark.parametrize("name", GGML)
def test_numbers_are_those_of_the_package(name: str) -> None:
    stored = drawn(name)
    theirs = of_the_package(name, stored)
    form = GGML[name]
    tensors = {"blocks": stored}
    assert len(theirs.unique()) > 8
    assert torch.equal(bits(form.dequantise(tensors)), bits(theirs))
    assert torch.equal(bits(numbers(form, tensors, torch.float32)), bits(theirs))
    assert torch.equal(numbers(form, tensors, torch.bfloat16), theirs.bfloat16())


@pytest.mark.parametrize("name", GGML)
def test_blocks_have_the_sizes_of_the_package(name: str) -> None:
    form = GGML[name]
    theirs = (
        OWN[name][:2] if name in OWN else gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    )
    assert (form.num_weights, form.nbytes) == theirs
    assert form.shape({"blocks": Stored(torch.uint8, (7, 2 * form.nbytes))}) == (
        7,
        2 * form.num_weights,
    )
    for row_nbytes in (0, form.nbytes - 1):
        with pytest.raises(Unfit, match=f"rows of {row_nbytes} bytes"):
            form.shape({"blocks": Stored(torch.uint8, (7, row_nbytes))})


@pytest.mark.parametrize("name", [name for name in GGML if name != "NVFP4"])
def test_a_scale_that_is_no_number_is_found(name: str) -> None:
    stored = drawn(name)
    assert GGML[name].fault({"blocks": stored}) is None
    start = SCALES.get(name, 0)
    stored[1, start : start + (8 if name == "IQ1_M" else 2)] = 255
    assert GGML[name].fault({"blocks": stored})
