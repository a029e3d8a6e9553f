"""Tokens of 8 bits are multiplied by blocks as whole numbers are: exactly, with the same bits on
any processor and any number of threads."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from artifacts.formats.gguf.ggml import GGML
from runtime.backends.cpu.forms_published import BLOCKS_OF_32, CpuPublished
from runtime.kernels.cpu.threads import KernelThreads
from runtime.kernels.load import kernels
from tests import ROOT
from tests.helpers.processors import as_processor
from tools.bench.kernels.stored_matrices import random_expert, variants

ROWS = 5
WIDTHS = (32, 128, 160, 256)  # one block, and whole steps with and without a rest


def random_blocks(name: str, width: int, generator: torch.Generator) -> torch.Tensor:
    """Blocks of any codes, uint8 [rows, bytes], whose scales are one."""
    form = GGML[name]
    size = ROWS, width // 32, form.nbytes
    blocks = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    scale = [127] if name == "MXFP4" else [0x00, 0x3C]  # of MXFP4 an exponent, else float16
    blocks[..., : len(scale)] = torch.tensor(scale, dtype=torch.uint8)
    return blocks.flatten(1)


def multiplied(name: str, blocks: torch.Tensor, x: np.ndarray) -> np.ndarray:
    """A matrix of blocks times a token that is rounded: float32 [rows]."""
    names = kernels("cpu.published.published")
    y = np.zeros(len(blocks), np.float32)
    kind = getattr(names, name) + names.IN_BYTES
    kernels("cpu.published.blocks").add_blocks_of_32(kind, blocks.data_ptr(), x, y, True)
    return y


@pytest.mark.parametrize("name", BLOCKS_OF_32)
def test_products_are_those_of_whole_numbers(name: str) -> None:
    """The largest of each block is 127, so that the worth of one is 1: every sum is exact."""
    random = torch.Generator().manual_seed(0)
    for width in WIDTHS:
        blocks = random_blocks(name, width, random)
        halves = torch.randint(-253, 254, (width,), generator=random).float() / 2
        halves[::32] = 127
        x = halves.numpy()
        rounded = np.trunc(x + np.copysign(0.5, x))  # halves away from zero
        numbers = GGML[name].dequantise({"blocks": blocks}).double().numpy()
        assert (multiplied(name, blocks, x) == numbers @ rounded).all(), width


def test_worth_is_of_each_block_and_nothing_stays_nothing() -> None:
    random = torch.Generator().manual_seed(0)
    blocks = random_blocks("Q8_0", 64, random)
    x = np.zeros(64, np.float32)
    assert not multiplied("Q8_0", blocks, x).any()
    x[32:] = np.linspace(-1e-3, 2e-3, 32)
    numbers = GGML["Q8_0"].dequantise({"blocks": blocks}).numpy()
    exact = numbers @ x
    step = 2e-3 / 127
    most = step / 2 * np.abs(numbers[:, 32:]).sum(1)
    assert (np.abs(multiplied("Q8_0", blocks, x) - exact) <= 1.01 * most).all()
    for strange in (np.nan, np.inf):
        x[40] = strange
        assert not np.isfinite(multiplied("Q8_0", blocks, x)).any()


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_any_number_of_threads_gives_the_same_bits(name: str) -> None:
    torch.manual_seed(0)
    layout, content = random_expert(variants(32)[f"GGUF, {name}"], 96, 64, torch.bfloat16)
    x = torch.randn(96).numpy()
    found = {}
    for activations in (None, 8):
        rows = CpuPublished(layout, torch.bfloat16, activations=activations).rows
        found[activations] = y = np.zeros((1, 96), np.float32)
        rows.multiply([content.data_ptr()], [0], x, y)
    assert 0 < np.abs(found[8] - found[None]).max() < 0.05 * np.abs(found[None]).max()
    for count in (2, 3, 5, 16):
        threads = KernelThreads(count)
        y = np.zeros((1, 96), np.float32)
        rows.multiply_on(threads, count, [content.data_ptr()], [0], x, y)
        threads.close()
        assert (y == found[8]).all(), count


def bits() -> str:
    """The bits of products with random tokens, as text."""
    random = torch.Generator().manual_seed(0)
    found = []
    for name in BLOCKS_OF_32:
        for width in WIDTHS:
            blocks = random_blocks(name, width, random)
            x = torch.randn(width, generator=random).numpy()
            found.append(multiplied(name, blocks, x).tobytes().hex())
    return " ".join(found)


@pytest.mark.slow
def test_a_processor_without_sums_of_fours_gives_the_same_bits() -> None:
    environment = os.environ | {"NUMBA_CPU_NAME": "haswell"}
    environment.pop("NUMBA_CPU_FEATURES", None)
    environment |= as_processor(environment)
    code = f"from {__name__} import bits; print(bits())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == bits().split()
