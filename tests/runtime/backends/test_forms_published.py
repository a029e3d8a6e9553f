"""Compiled code multiplies a token by experts in every published format where they lie, as by their
numbers."""

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from artifacts.formats.gguf.ggml import GGML
from runtime.backends.cpu.form import TokenOperands
from runtime.backends.cpu.forms_published import CpuPublished, has_published_form
from runtime.kernels.load import AS_NUMPY, kernels
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.layout import ExpertLayout
from tools.bench.kernels.stored_matrices import Stored, random_expert, variants

TOLERANCE = {
    torch.float32: 2e-5,
    torch.float16: 1.25e-3,
    torch.bfloat16: 1e-2,
}  # of the largest output
SIZES = {  # hidden, neurons, group
    "every kernel in vectors": (512, 256, 32),
    "nothing in vectors": (96, 40, 8),
    "a part in vectors": (384, 192, 64),
    "more groups than a vector has, and half a step": (576, 192, 16),
    "blocks that are cut off": (576, 192, 128),
}


def of_size(name: str, size: str) -> bool:
    """Whether a format has groups of this size, in experts of the sizes above."""
    hidden, neurons, group = SIZES[size]
    if size == "blocks that are cut off":
        return name.startswith("FP8, blocks")
    if name.startswith("GGUF"):
        num_weights = GGML[name.removeprefix("GGUF, ")].num_weights
        return hidden % num_weights == neurons % num_weights == 0 and group in (32, 64)
    return group % 32 == 0 or not name.startswith(("MXFP4", "NVFP4", "AWQ", "GPTQ"))


IN_FLOAT16 = (
    "FP8, blocks",
    "MXFP4",
    "AWQ",
)  # floats, a table, integers: each kind of numbers is compiled for seconds
CASES = [
    pytest.param(name, size, dtype, id=f"{name}-{size}-{dtype}".replace("torch.", ""))
    for size, (_, _, group) in SIZES.items()
    for name in variants(group)
    for dtype in TOLERANCE
    if of_size(name, size) and (dtype is not torch.float16 or name in IN_FLOAT16)
]


def expected(layout: ExpertLayout, content: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The output [H] of an expert with float32 numbers, rounded where the module rounds."""
    weights = layout.weights(content)
    gate, up = F.linear(x.float(), weights[GATE_UP]).to(x.dtype).chunk(2, dim=-1)
    return F.linear((F.silu(gate) * up).float(), weights[DOWN])[0]


def multiplied(
    layout: ExpertLayout, content: torch.Tensor, hidden: int, first: float = 1.0
) -> torch.Tensor:
    """The output [H] on a token of ones but for the first number, in bfloat16."""
    y = np.zeros((1, hidden), np.float32)
    like = torch.empty(0, dtype=AS_NUMPY[torch.bfloat16]).numpy()
    operands = TokenOperands(
        np.array([first] + [1] * (hidden - 1), np.float32), np.zeros(1, np.int64), y, like
    )
    CpuPublished(layout, torch.bfloat16).multiply((), [content.data_ptr()], operands)
    return torch.from_numpy(y[0])


def indexed(name: str, index: Callable[[int], torch.Tensor]) -> Stored:
    """A format with the group of each of so many inputs."""
    format, make = variants(32)[name]
    return Stored(format, lambda r, c: make(r, c) | {"g_idx": index(c).int()})


@pytest.mark.parametrize(
    "name", ["compressed-tensors, 4 bits", "compressed-tensors, 8 bits", "GPTQ, 4 bits"]
)
def test_an_index_that_leaves_groups_in_their_order_changes_nothing(name: str) -> None:
    """compressed-tensors writes -1 for all inputs, GPTQ the groups."""
    in_order = indexed(
        name, lambda c: torch.arange(c) // 32 if name.startswith("GPTQ") else torch.full((c,), -1)
    )
    outputs = []
    for stored in (variants(32)[name], in_order):
        torch.manual_seed(0)
        outputs.append(multiplied(*random_expert(stored, 128, 64, torch.bfloat16), 128))
    assert outputs[0].any() and torch.equal(*outputs)


@pytest.mark.parametrize(
    "name", ["compressed-tensors, 4 bits, asymmetric", "compressed-tensors, 8 bits", "GPTQ, 4 bits"]
)
def test_groups_of_any_sizes_are_multiplied_as_by_their_numbers(name: str) -> None:
    torch.manual_seed(0)
    layout, content = random_expert(
        indexed(name, lambda c: torch.randint(0, c // 32, (c,))), 256, 128, torch.float32
    )
    exact = expected(layout, content, torch.ones(1, 256, dtype=torch.bfloat16))
    assert (multiplied(layout, content, 256) - exact).abs().max() <= TOLERANCE[
        torch.bfloat16
    ] * exact.abs().max()


@pytest.mark.parametrize(
    "name", ["FP8, blocks", "MXFP4", "compressed-tensors, 4 bits, in the order of activations"]
)
def test_without_tables_of_bytes_rows_are_multiplied_in_float32(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layout, content = random_expert(variants(32)[name], 256, 128, torch.float32)
    monkeypatch.setattr("runtime.kernels.cpu.lanes.HAS_BYTE_TABLES", False)
    # must not be imported
    monkeypatch.setitem(sys.modules, "runtime.kernels.cpu.published.narrow_rows", None)
    kernels.cache_clear()
    exact = expected(layout, content, torch.ones(1, 256, dtype=torch.bfloat16))
    assert (multiplied(layout, content, 256) - exact).abs().max() <= TOLERANCE[
        torch.bfloat16
    ] * exact.abs().max()


@pytest.mark.parametrize("name", ["GPTQ, 4 bits", "GPTQ, 4 bits, desc_act", "AWQ"])
@pytest.mark.parametrize("first", [np.nan, np.inf])
def test_a_token_of_no_numbers_gives_none(name: str, first: float) -> None:
    stored = variants(32)[name]
    assert multiplied(*random_expert(stored, 256, 128, torch.bfloat16), 256, first).isnan().all()


@pytest.mark.parametrize(("name", "size", "dtype"), CASES)
def test_experts_are_multiplied_as_by_their_numbers(
    name: str, size: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    hidden, neurons, group = SIZES[size]
    made = [random_expert(variants(group)[name], hidden, neurons, torch.float32) for _ in range(2)]
    layout = made[0][0]
    # float16 ends at 65504
    x = (torch.randn(1, hidden) / 8).to(dtype)
    y = np.zeros((3, hidden), np.float32)
    operands = TokenOperands(
        x.float().numpy()[0], np.array([2, 0]), y, torch.empty(0, dtype=AS_NUMPY[dtype]).numpy()
    )
    assert has_published_form(layout)
    CpuPublished(layout, dtype).multiply((), [content.data_ptr() for _, content in made], operands)
    for (_, content), row in zip(made, operands.rows, strict=True):
        exact = expected(layout, content, x)
        assert (torch.from_numpy(y[row]) - exact).abs().max() <= TOLERANCE[
            dtype
        ] * exact.abs().max()
    assert not y[1].any()
