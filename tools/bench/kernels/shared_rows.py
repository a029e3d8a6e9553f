"""One step's experts on one token, whose rows the CPU's threads share, beside whole experts a
thread.

    python -m tools.bench.kernels.shared_rows --threads 1 2 4 8 16
    python -m tools.bench.kernels.shared_rows --format "GGUF, Q4_K" --experts 1

Random experts of OLMoE-1B-7B's size, more than any cache holds; the ways take turns. Medians with
their quartiles, and bytes of weights over the median.
"""

import argparse
import os
import time
from collections.abc import Iterator
from statistics import quantiles
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from transformers.integrations.moe import _default_apply_gate

from artifacts.shape import FULL_BITS
from runtime.backends.cpu.forms_cpu import TokenKernels
from runtime.control.plan import Place
from runtime.kernels.cpu.threads import KernelThreads
from runtime.model.layout import Layout
from runtime.tiers.slow import SlowTier
from tools.arguments import parser_of
from tools.bench.kernels.stored_matrices import plain_expert, random_expert, variants

HIDDEN, NEURONS = 2048, 1024
_HELD = 2 << 30  # bytes of experts that take turns
_WARM = 3  # turns that are not counted
WAYS = ROWS, EXPERTS = "rows", "experts"


def main() -> None:
    options = _options()
    torch.manual_seed(0)
    count = options.experts
    contents = list(_experts(options.format, count))
    y = np.zeros((count, HIDDEN), np.float32)
    ways = [
        (number, way) for number in options.threads for way in WAYS if number > 1 or way == ROWS
    ]
    calls = [_kernels(contents, KernelThreads(number), way) for number, way in ways]
    seconds = [[] for _ in calls]
    step = 0
    for _ in range(options.turns + _WARM):
        for kernels, own in zip(calls, seconds, strict=True):
            places = [Place(i, i % len(contents), FULL_BITS) for i in range(step, step + count)]
            own.append(_timed(kernels, places, y))
            step += count  # so that no way finds in a cache what another has read
    nbytes = count * contents[0][1].nbytes
    print(f"{options.format}, {count} of {nbytes / count / 1e6:.1f} MB, {os.cpu_count()} cores")
    print(f"{'threads':>7} {'each takes':>10} {'us':>7} {'quartiles':>13} {'GB/s':>6}")
    for (number, way), own in zip(ways, seconds, strict=True):
        low, middle, high = (1e6 * second for second in quantiles(own[_WARM:], n=4))
        spread = f"{low:.0f} to {high:.0f}"
        print(f"{number:7} {way:>10} {middle:7.0f} {spread:>13} {nbytes / middle / 1e3:6.1f}")


def _experts(name: str, count: int) -> Iterator[tuple[Layout, torch.Tensor]]:
    """Yield as many experts as fill `_HELD`, a multiple of `count`."""
    held = 0
    number = 0
    while held < _HELD or number % count:
        layout, content = (
            plain_expert(HIDDEN, NEURONS)
            if name == "bfloat16"
            else random_expert(variants(32)[name], HIDDEN, NEURONS, torch.bfloat16)
        )
        held += content.nbytes
        number += 1
        yield layout, content


class _SiluExperts(nn.Module):
    """Experts whose gate is SiLU's, without weights."""

    has_gate = is_concatenated = True
    act_fn = staticmethod(nn.functional.silu)
    _apply_gate = _default_apply_gate


def _kernels(
    contents: list[tuple[Layout, torch.Tensor]], threads: KernelThreads, way: str
) -> TokenKernels:
    store = SimpleNamespace(layout=contents[0][0])
    slots = [content for _, content in contents]
    resident = SimpleNamespace(slow=SlowTier.plain(store), shadows=None, slots=slots)
    layer = SimpleNamespace(hidden_size=HIDDEN, experts=_SiluExperts())
    opened = SimpleNamespace(dtype=torch.bfloat16, layers=[layer], activations=None)
    kernels = TokenKernels(opened, resident, threads)
    kernels._forms[FULL_BITS].rows.are_divisible = way == ROWS
    kernels.take(torch.randn(1, HIDDEN).bfloat16())
    return kernels


def _timed(kernels: TokenKernels, places: list[Place], y: np.ndarray) -> float:
    """Return the seconds of one step."""
    starts = kernels.starts(places)
    begin_s = time.perf_counter()
    kernels.add(places, starts, range(len(places)), y)
    return time.perf_counter() - begin_s


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, experts=(4, "of a step"), threads=[1, 2], turns=60)
    parser.add_argument("--format", default="bfloat16", choices=("bfloat16", *variants(32)))
    return parser.parse_args()


if __name__ == "__main__":
    main()
