"""Matrices in few bits by tiles of rows: joined and turned to the bit, and multiplied as the whole
matrix is."""

from hashlib import sha256
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.layout import ExpertLayout
from runtime.model.quantised.quantised_matrix import (
    Parts,
    joined,
    project_in_tiles,
    project_quantised,
)
from tools.bench.kernels.stored_matrices import Stored, random_expert, stored_expert, variants

# of several tiles each
HIDDEN = 2048
NEURONS = 1056


@pytest.fixture(scope="module", params=["FP8, blocks", "MXFP4", "AWQ"])
def expert(request: pytest.FixtureRequest) -> tuple[ExpertLayout, Parts]:
    torch.manual_seed(0)
    layout, content = random_expert(variants(32)[request.param], HIDDEN, NEURONS, torch.bfloat16)
    return layout, layout.views(content)


def test_matrices_are_joined_as_the_module_has_them(expert: tuple[ExpertLayout, Parts]) -> None:
    matrices = expert[1][GATE_UP]
    by_formula = torch.cat([each.format.dequantise(each.tensors).bfloat16() for each in matrices])
    assert torch.equal(joined(matrices, torch.bfloat16, is_transposed=False), by_formula)
    assert torch.equal(joined(matrices, torch.bfloat16, is_transposed=True), by_formula.T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_tiles_multiply_as_the_whole_matrix(
    expert: tuple[ExpertLayout, Parts], is_transposed: bool, dtype: torch.dtype
) -> None:
    bias = torch.randn(2 * NEURONS).to(dtype)
    x = torch.randn(5, HIDDEN).to(dtype)
    module = SimpleNamespace(is_transposed=is_transposed, has_bias=True)
    weights = expert[1] | {f"{GATE_UP}_bias": bias}
    exact = F.linear(
        x.float(), joined(weights[GATE_UP], torch.float32, is_transposed=False), bias.float()
    )
    for project in (project_quantised, project_in_tiles):
        y = project(module, weights, GATE_UP, x)
        assert y.dtype is dtype
        assert (y.float() - exact).abs().max() <= 1.3 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_float16_that_is_not_quantised_is_multiplied_to_the_last_bit_but_one(
    is_transposed: bool,
) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(2 * NEURONS, HIDDEN).half()
    x = torch.randn(5, HIDDEN).half()
    module = SimpleNamespace(is_transposed=is_transposed, has_bias=False)
    y = project_in_tiles(module, {GATE_UP: matrix.T if is_transposed else matrix}, GATE_UP, x)
    exact = F.linear(x.float(), matrix.float())
    assert y.dtype is torch.float16
    assert (y.float() - exact).abs().max() <= torch.finfo(torch.float16).eps * exact.abs().max()


@pytest.mark.parametrize("name", ["GPTQ, 4 bits", "AWQ"])
def test_a_digest_is_of_the_bytes_of_the_checkpoint_where_groups_follow_each_other(
    name: str,
) -> None:
    stored = variants(32)[name]
    if name != "AWQ":
        format, make = stored
        stored = Stored(format, lambda r, c: make(r, c) | {"g_idx": (torch.arange(c) // 32).int()})
    layout, content = stored_expert(stored, 64, 96, torch.bfloat16)
    digest = sha256()
    for part in layout.parts:
        digest.update(part.bytes_of(content).numpy())
    assert layout.arrange(content) is None and layout.digest(content) == digest.hexdigest()


@pytest.mark.parametrize("size", [(64, 96), (136, 1160)])
def test_awq_has_the_numbers_of_its_stored_matrix_in_a_slot(size: tuple[int, int]) -> None:
    """Also where a row of words is no whole number of vectors."""
    stored = variants(8)["AWQ"]
    made = []

    def make(rows: int, columns: int) -> dict[str, torch.Tensor]:
        made.append(stored.make(rows, columns))
        return made[-1]

    layout, content = random_expert(Stored(stored.format, make), *size, torch.float32)
    views = layout.views(content)
    for matrix, tensors in zip((*views[GATE_UP], *views[DOWN]), made, strict=True):
        assert torch.equal(
            matrix.format.dequantise(matrix.tensors), stored.format.dequantise(tensors)
        )
