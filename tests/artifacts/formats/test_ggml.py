"""ggml's blocks: the numbers of the package `gguf`, to the bit, by the formula in torch and by the
compiled loops."""

import gguf
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


@pytest.mark.parametrize("name", GGML)
def test_numbers_are_those_of_the_package(name: str) -> None:
    stored = drawn(name)
    theirs = torch.from_numpy(
        gguf.quants.dequantize(stored.numpy(), gguf.GGMLQuantizationType[name])
    )
    form = GGML[name]
    tensors = {"blocks": stored}
    assert len(theirs.unique()) > form.num_weights / 4
    assert torch.equal(bits(form.dequantise(tensors)), bits(theirs))
    assert torch.equal(bits(numbers(form, tensors, torch.float32)), bits(theirs))
    assert torch.equal(numbers(form, tensors, torch.bfloat16), theirs.bfloat16())


@pytest.mark.parametrize("name", GGML)
def test_blocks_have_the_sizes_of_the_package(name: str) -> None:
    form = GGML[name]
    assert (form.num_weights, form.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert form.shape({"blocks": Stored(torch.uint8, (7, 2 * form.nbytes))}) == (
        7,
        2 * form.num_weights,
    )
    for row_nbytes in (0, form.nbytes - 1):
        with pytest.raises(Unfit, match=f"rows of {row_nbytes} bytes"):
            form.shape({"blocks": Stored(torch.uint8, (7, row_nbytes))})


@pytest.mark.parametrize("name", GGML)
def test_a_scale_that_is_no_number_is_found(name: str) -> None:
    stored = drawn(name)
    assert GGML[name].fault({"blocks": stored}) is None
    start = SCALES.get(name, 0)
    stored[1, start : start + 2] = 255
    assert GGML[name].fault({"blocks": stored})
