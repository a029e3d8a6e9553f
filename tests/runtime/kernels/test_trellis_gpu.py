"""The Triton kernels for trellis codes agree with the oracle in triton's interpreter on a CPU, and
compile for GPUs."""

import json
from pathlib import Path

import pytest
import torch

from artifacts.quantisation.trellis import rotation
from artifacts.quantisation.trellis.trellis import HALF_BITS
from tests.helpers.triton_process import compiled, compiler, interpret, needs_triton

pytestmark = [needs_triton, pytest.mark.slow]
# out, in, half bits, columns with half a bit more, whether outputs are rotated
CASES = [
    *((40, 72, half_bits, 16, half_bits % 2 == 0) for half_bits in HALF_BITS[:-1]),
    (33, 40, 8, 0, True),
    (64, 160, 4, 160, False),
]
RUNS = [(1, "float32"), (3, "float16"), (9, "bfloat16")]
ALLOWED = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
PRODUCTS = """
import json, sys
import torch
from runtime.kernels.gpu import trellis as kernels
from tools.gpu.checks.trellis import random_trellis
cases, runs = json.loads(sys.argv[1])
for out, size, half_bits, num_high, is_rotated in cases:
    trellis = random_trellis(out, size, half_bits, num_high, is_rotated=is_rotated)
    for count, dtype in runs:
        x = torch.randn(count, size, generator=torch.Generator().manual_seed(3)).to(getattr(torch, dtype))
        theirs = x.double() @ trellis.dequantised().double().mT
        multiply = kernels.multiply_unpacked if count >= kernels.MANY_TOKENS else kernels.multiply
        y = multiply(x, trellis)
        assert y.shape == theirs.shape and y.dtype == x.dtype, (y.shape, y.dtype)
        print(json.dumps([[out, size, half_bits], dtype, ((y.double() - theirs).norm() / theirs.norm()).item()]))
"""


def test_products_agree_with_the_oracle() -> None:
    lines = interpret(PRODUCTS, json.dumps([CASES, RUNS]))
    assert len(lines) == len(CASES) * len(RUNS)
    for case, dtype, error in map(json.loads, lines):
        assert error < ALLOWED[dtype], (case, dtype, error)


@pytest.mark.parametrize("length", [1, 8, 24, 96, 45 * 64, 4096])
def test_rotations_are_those_of_the_format(length: int) -> None:
    from runtime.kernels.gpu.rotation import rotate, rotate_back

    x = torch.randn(2, length, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(rotate(x), torch.from_numpy(rotation.rotate(x.numpy())), atol=3e-6)
    assert torch.allclose(
        rotate_back(x), torch.from_numpy(rotation.rotate_back(x.numpy())), atol=3e-6
    )


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_they_compile_for_gpus(capability: int, tmp_path: Path) -> None:
    from runtime.kernels.gpu.experts.gated_trellis import _keep
    from runtime.kernels.gpu.trellis import _arrange, _multiply, _unpack

    tensors = dict.fromkeys(
        ("x_ptr", "y_ptr", "out_ptr", "scale_ptr", "worths_ptr", "row_worths_ptr"), "*fp32"
    )
    tensors |= {
        "numbers_ptr": "*i64",
        "starts_ptr": "*i64",
        "codes_ptr": "*i16",
        "words_ptr": "*i16",
    }
    tensors |= {
        "levels_ptr": "*i16",
        "high_ptr": "*u8",
        "row_scales_ptr": "*u8",
        "outputs_ptr": "*fp32",
    }
    tensors |= dict.fromkeys(("first", "second", "third", "fourth"), "i64")
    blocks = {"half_bits": 3, "block_rows": 32, "block_columns": 64}
    with compiler(tmp_path):
        assert compiled(_arrange, capability, tensors, are_packed=True, block=2048)["cubin"]
        assert compiled(
            _multiply, capability, tensors, has_row_scales=True, are_packed=False, **blocks
        )["cubin"]
        assert compiled(_keep, capability, tensors, are_packed=True, block=1024)["cubin"]
        assert compiled(_unpack, capability, tensors | {"out_ptr": "*bf16"}, **blocks)["cubin"]
