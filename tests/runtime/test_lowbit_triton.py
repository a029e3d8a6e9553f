"""The Triton kernel: what it computes, by triton's interpreter on a CPU, and that it compiles for GPUs without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import triton"], capture_output=True, check=False).returncode != 0,
    reason="triton is not installed here: the kernel for GPUs stays untested",
)
# out, in, group: blocks that are full or not, groups of a row, groups that end within a word; and programs wished for,
# 1 for all groups in one, many for each in its own.
SHAPES = [(64, 96, 32, 1), (50, 24, 24, 1), (40, 96, 48, 99), (130, 256, 128, 99)]
RUNS = [(0, "float32"), (1, "float32"), (3, "float16"), (15, "bfloat16")]
ALLOWED = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 5e-3}
INTERPRETED = """
import json, sys
import torch
from runtime import lowbit_triton
from runtime.lowbit import dequantise
from tools.gpu_lowbit import random_packed
shapes, runs = json.loads(sys.argv[1])
for out, size, group_size, lowbit_triton._PROGRAMS in shapes:
    for bits in (1, 2, 3, 4):
        packed = random_packed(out, size, bits, group_size)
        for dtype in (torch.float32, torch.float16):  # the interpreter cuts bfloat16 where a GPU rounds
            assert torch.equal(lowbit_triton.dequantise(packed, dtype), dequantise(packed, dtype))
        for count, dtype in runs:
            x = torch.randn(count, size, generator=torch.Generator().manual_seed(3)).to(getattr(torch, dtype))
            y, theirs = lowbit_triton.multiply(x, packed), x.float() @ dequantise(packed).mT
            assert y.shape == theirs.shape and y.dtype == x.dtype, (y.shape, y.dtype)
            error = ((y.float() - theirs).norm() / theirs.norm()).item() if count else 0.0
            print(json.dumps([f"{out}x{size}, groups of {group_size}, {bits} bits, {count}", dtype, error]))
"""
COMPILED = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from runtime.lowbit_triton import _multiply, _unpack
tensors = {"words_ptr": "*i32", "zeros_ptr": "*i32", "scales_ptr": "*fp16", "shares_ptr": "*fp32"}
def size(kernel, capability, types, **constants):
    names = kernel.arg_names
    types = {n: "i32" for n in names} | tensors | types | {n: "constexpr" for n in constants}
    types = {n: types[n] for n in names}
    source = ASTSource(kernel, types, {(names.index(n),): value for n, value in constants.items()})
    return len(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"])
blocks = dict(bits=3, block_outputs=64, block_inputs=64)
print(size(_multiply, 80, {"x_ptr": "*bf16"}, num_rows=16, precision="tf32", **blocks))
print(size(_multiply, 90, {"x_ptr": "*fp32"}, num_rows=1, precision="ieee", **blocks))
print(size(_unpack, 90, {"out_ptr": "*bf16"}, **blocks))
"""


def run(code: str, *arguments: str, **variables: str) -> list[str]:
    """In a process of its own: triton decides as it is imported whether it interprets."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_agrees_with_the_oracle() -> None:
    lines = run(INTERPRETED, json.dumps([SHAPES, RUNS]), TRITON_INTERPRET="1")
    assert len(lines) == len(SHAPES) * 4 * len(RUNS)
    for case, dtype, error in map(json.loads, lines):
        assert error < ALLOWED[dtype], (case, dtype, error)


def test_it_compiles_for_gpus(tmp_path: Path) -> None:
    sizes = run(COMPILED, TRITON_CACHE_DIR=str(tmp_path))
    assert len(sizes) == 3 and all(int(size) > 0 for size in sizes)
