"""The low-bit Triton kernels agree with the oracle in triton's interpreter on a CPU."""

import json

import pytest

from artifacts.quantisation.widths import SCALAR_WIDTHS
from tests.helpers.triton_process import interpret, needs_triton

pytestmark = [needs_triton, pytest.mark.slow]
# out, in, group, programs: full and partial blocks, one group per row, groups that end within a
# word. 1 program takes all groups, 99 take one each.
SHAPES = [(64, 96, 32, 1), (50, 24, 24, 1), (40, 96, 48, 99), (130, 256, 128, 99)]
RUNS = [(0, "float32"), (1, "float32"), (3, "float16"), (15, "bfloat16")]
ALLOWED = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 5e-3}
INTERPRETED = """
import json, sys
import torch
from runtime.kernels.gpu import low_bit
from artifacts.quantisation.widths import SCALAR_WIDTHS
from runtime.kernels.low_bit import dequantise
from tools.gpu.checks.low_bit import random_packed
shapes, runs = json.loads(sys.argv[1])
for out, size, group_size, low_bit._PROGRAMS in shapes:
    for bits in SCALAR_WIDTHS:
        packed = random_packed(out, size, bits, group_size)
        for dtype in (torch.float32, torch.float16):  # the interpreter truncates bfloat16 where a GPU rounds
            assert torch.equal(low_bit.dequantise(packed, dtype), dequantise(packed, dtype))
        for count, dtype in runs:
            x = torch.randn(count, size, generator=torch.Generator().manual_seed(3)).to(getattr(torch, dtype))
            y, theirs = low_bit.multiply(x, packed), x.float() @ dequantise(packed).mT
            assert y.shape == theirs.shape and y.dtype == x.dtype, (y.shape, y.dtype)
            error = ((y.float() - theirs).norm() / theirs.norm()).item() if count else 0.0
            print(json.dumps([f"{out}x{size}, groups of {group_size}, {bits} bits, {count}", dtype, error]))
"""


def test_it_agrees_with_the_oracle() -> None:
    lines = interpret(INTERPRETED, json.dumps([SHAPES, RUNS]))
    assert len(lines) == len(SHAPES) * len(SCALAR_WIDTHS) * len(RUNS)
    for case, dtype, error in map(json.loads, lines):
        assert error < ALLOWED[dtype], (case, dtype, error)
