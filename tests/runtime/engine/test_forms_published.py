"""Compiled code multiplies a token by experts in every published format where they lie, as by their numbers."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from runtime.engine.forms_published import CpuPublished, has_published_form
from runtime.engine.token_operands import TokenOperands
from runtime.kernels.load import AS_NUMPY
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.quantised_layout import QuantisedLayout
from tools.bench.stored_matrices import Stored, random_expert, variants

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}  # of the largest output
SIZES = {  # hidden, neurons, group
    "every kernel in vectors": (256, 256, 32),
    "nothing in vectors": (96, 40, 8),
    "a part in vectors": (384, 192, 64),
}


def of_size(name: str, group: int) -> bool:
    """Whether a format has groups of this size, in experts of the sizes above."""
    if name.startswith("GGUF"):
        return group == 32 if name.endswith("_K") else group != 8
    return group % 32 == 0 or not name.startswith(("MXFP4", "NVFP4", "AWQ", "GPTQ"))


CASES = [
    pytest.param(name, size, dtype, id=f"{name}-{size}-{dtype}".replace("torch.", ""))
    for size, (_, _, group) in SIZES.items()
    for name in variants(group)
    for dtype in TOLERANCE
    if of_size(name, group)
]


def expected(layout: QuantisedLayout, content: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The output [H] of an expert with float32 numbers, rounded where the module rounds."""
    weights = layout.weights(content)
    gate, up = F.linear(x.float(), weights[GATE_UP]).to(x.dtype).chunk(2, dim=-1)
    return F.linear((F.silu(gate) * up).float(), weights[DOWN])[0]


def multiplied(layout: QuantisedLayout, content: torch.Tensor, hidden: int) -> torch.Tensor:
    """The output [H] on a token of ones, in bfloat16."""
    y, like = np.zeros((1, hidden), np.float32), torch.empty(0, dtype=AS_NUMPY[torch.bfloat16]).numpy()
    operands = TokenOperands(np.ones(hidden, np.float32), np.zeros(1, np.int64), y, like)
    CpuPublished(layout, torch.bfloat16).multiply((), [content.data_ptr()], operands)
    return torch.from_numpy(y[0])


@pytest.mark.parametrize("name", ["compressed-tensors, 4 bits", "compressed-tensors, 8 bits", "GPTQ, 4 bits"])
@pytest.mark.parametrize("number", [-1, 1000], ids=["as the library writes it", "damaged"])
def test_numbers_of_no_group_leave_groups_in_their_order(name: str, number: int) -> None:
    format, make = variants(32)[name]
    indexed = Stored(format, lambda r, c: make(r, c) | {"g_idx": torch.full((c,), number, dtype=torch.int32)})
    outputs = []
    for stored in (Stored(format, make), indexed):
        torch.manual_seed(0)
        outputs.append(multiplied(*random_expert(stored, 128, 64, torch.bfloat16), 128))
    assert outputs[0].any() and torch.equal(*outputs)


@pytest.mark.parametrize(("name", "size", "dtype"), CASES)
def test_experts_are_multiplied_as_by_their_numbers(name: str, size: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, neurons, group = SIZES[size]
    made = [random_expert(variants(group)[name], hidden, neurons, torch.float32) for _ in range(2)]
    layout = made[0][0]
    x, y = torch.randn(1, hidden).to(dtype), np.zeros((3, hidden), np.float32)
    operands = TokenOperands(x.float().numpy()[0], np.array([2, 0]), y, torch.empty(0, dtype=AS_NUMPY[dtype]).numpy())
    assert has_published_form(layout)
    CpuPublished(layout, dtype).multiply((), [content.data_ptr() for _, content in made], operands)
    for (_, content), row in zip(made, operands.rows, strict=True):
        exact = expected(layout, content, x)
        assert (torch.from_numpy(y[row]) - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()
    assert not y[1].any()
