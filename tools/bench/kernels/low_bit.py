"""Products with packed weights on a CPU: our kernels beside alternatives, by width, shape and
tokens.

    python -m tools.bench.kernels.low_bit

Contenders take turns in rounds; a ratio is that of one round, to `F.linear` with the same weights
in bfloat16, so that what else the machine does meanwhile falls on all alike. Cold weights are many
matrices in rotation, 96 MiB of them for each contender, as where many experts are resident; hot
ones stay in the cache. int4pack is torch's kernel for 4 bits, to which fewer can be widened, and
which has no 8; what that takes in time and memory is told below the table.
"""

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch.nn import functional as F

from artifacts.quantisation.packing import Packed, unpack
from artifacts.quantisation.widths import SCALAR_WIDTHS
from moectl.show.render import Sheet, show_sheet
from runtime.kernels import low_bit
from runtime.kernels.cpu.replicas import low_bit as cpu_low_bit
from tools.arguments import parser_of
from tools.bench.measuring import in_turns
from tools.gpu.checks.low_bit import copied, random_packed

SHAPES = ((1024, 2048), (64, 128), (128, 32))  # [out, in]: OLMoE-1B-7B's, then the bundled model's
TOKENS = (1, 2, 4, 8, 12, 16, 32, 64)
COLD_NBYTES = 96 << 20
LARGE = 1 << 20  # matrices of at least this many weights are measured cold as well
TURN_S = 2e-3  # seconds of one contender in one round, approximately

log = logging.getLogger("bench_lowbit")

Weights = tuple[torch.Tensor, ...] | Packed
Product = Callable[[torch.Tensor, Weights], torch.Tensor]
_Weights = TypeVar("_Weights")


@dataclass(frozen=True, slots=True)
class Contender:
    """A layout of the weights, made from a Packed of at most `most_bits` bits, and the product of x
    with it."""

    name: str
    prepare: Callable[[Packed], Weights]
    multiply: Product
    most_bits: int = SCALAR_WIDTHS[-1]


@dataclass(frozen=True, slots=True)
class Result:
    """Median microseconds of a product by contender, and the median of its ratios to bfloat16."""

    shape: tuple[int, int]
    bits: int
    tokens: int
    is_cold: bool
    us: dict[str, float]
    ratios: dict[str, float]


def as_bfloat16(packed: Packed) -> tuple[torch.Tensor, ...]:
    return (low_bit.dequantise(packed, torch.bfloat16).contiguous(),)


def as_int4pack(packed: Packed) -> tuple[torch.Tensor, ...]:
    """w = (q - 8) * s + z, with codes of any width centred in 4 bits; otherwise z would be large
    and lose precision."""
    middle = 1 << packed.bits - 1
    codes = unpack(packed.qweight.numpy(), packed.bits, packed.num_inputs).T.astype(np.int32) + (
        8 - middle
    )
    zeros = 0.5
    if packed.qzeros is not None:
        zeros = torch.from_numpy(
            unpack(packed.qzeros.mT.numpy(), packed.bits, packed.num_outputs).T.copy()
        ).float()
    scales = packed.scales.float()
    words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        torch.from_numpy(np.ascontiguousarray(codes)), 1
    )
    return words, torch.stack((scales, (middle - zeros) * scales), dim=2).bfloat16()


def by_int4pack(x: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
    words, grid = weights
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, words, x.shape[1] // len(grid), grid)


CONTENDERS = (
    Contender("bfloat16", as_bfloat16, lambda x, weights: F.linear(x, *weights)),
    Contender("stream", lambda packed: packed, cpu_low_bit.multiply),
    Contender(
        "unpack",
        lambda packed: packed,
        lambda x, own: F.linear(x, cpu_low_bit.dequantise(own, x.dtype)),
    ),
    Contender("int4pack", as_int4pack, by_int4pack, most_bits=4),
    Contender(
        "torch", lambda packed: packed, lambda x, own: F.linear(x, low_bit.dequantise(own, x.dtype))
    ),
)


def contenders(bits: int) -> list[Contender]:
    """Return the contenders that take codes of `bits` bits."""
    return [each for each in CONTENDERS if bits <= each.most_bits]


def main() -> None:
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    results = []
    for shape in SHAPES:
        for bits in options.bits:
            for is_cold in are_cold(shape):
                log.info("%d x %d at %d bits, %s", *shape, bits, "cold" if is_cold else "hot")
                results += measure(
                    shape, bits, options.tokens, is_cold=is_cold, rounds=options.rounds
                )
    show_sheet(sheet(results, rounds=options.rounds))
    for bits in options.bits:
        if bits <= 4:
            print(conversion(SHAPES[0], bits))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


def measure(
    shape: tuple[int, int], bits: int, tokens: list[int], *, is_cold: bool, rounds: int
) -> list[Result]:
    """Every contender on matrices [out, in], for each number of tokens."""
    packed = random_packed(*shape, bits)
    products = {
        each.name: _turning(each, each.prepare(packed), is_cold=is_cold)
        for each in contenders(bits)
    }
    results = []
    for count in tokens:
        x = torch.randn(count, shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
        seconds = run_rounds(x, products, rounds=rounds)
        plain = seconds["bfloat16"]
        ratios = {
            name: statistics.median(a / b for a, b in zip(own, plain, strict=True))
            for name, own in seconds.items()
        }
        us = {name: statistics.median(own) * 1e6 for name, own in seconds.items()}
        results.append(Result(shape, bits, count, is_cold, us, ratios))
    return results


def _turning(
    contender: Contender, weights: Weights, *, is_cold: bool
) -> Callable[[torch.Tensor], object]:
    """The product with the weights, or with one after another of more sets than fit into any
    cache."""
    clone = copied if isinstance(weights, Packed) else lambda own: tuple(map(torch.clone, own))
    turns = turning(weights, nbytes(weights), clone, is_cold=is_cold)
    return lambda x: contender.multiply(x, turns())


def turning(
    weights: _Weights, nbytes: int, clone: Callable[[_Weights], _Weights], *, is_cold: bool
) -> Callable[[], _Weights]:
    """Return a function that gives the next of some copies; one copy stays in the cache."""
    number = max(2, COLD_NBYTES // nbytes) if is_cold else 1
    return cycle([clone(weights) for _ in range(number)]).__next__


def are_cold(shape: tuple[int, int]) -> tuple[bool, ...]:
    """Return whether weights are cold, in turn: small ones are measured hot alone."""
    return (False, True) if shape[0] * shape[1] >= LARGE else (False,)


def nbytes(weights: Weights) -> int:
    return (
        weights.nbytes if isinstance(weights, Packed) else sum(tensor.nbytes for tensor in weights)
    )


def run_rounds(
    x: torch.Tensor, products: Mapping[str, Callable[[torch.Tensor], object]], *, rounds: int
) -> dict[str, list[float]]:
    """Seconds of a product per contender and round. The first round warms up; each begins with
    another contender."""
    calls = dict.fromkeys(products, 1)
    seconds: dict[str, list[float]] = {name: [] for name in products}
    for turn, name in in_turns(list(products), rounds + 1):
        multiply = products[name]
        multiply(x)
        begin_s = time.perf_counter()
        for _ in range(calls[name]):
            multiply(x)
        taken_s = (time.perf_counter() - begin_s) / calls[name]
        calls[name] = max(1, round(TURN_S / taken_s))
        if turn:
            seconds[name].append(taken_s)
    return seconds


def conversion(shape: tuple[int, int], bits: int) -> str:
    """Time and memory of converting a matrix to int4pack's form."""
    packed = random_packed(*shape, bits)
    seconds = []
    for _ in range(5):
        begin_s = time.perf_counter()
        converted = as_int4pack(packed)
        seconds.append(time.perf_counter() - begin_s)
    weights = shape[0] * shape[1]
    held = nbytes(converted) * 8 / weights
    stored = packed.nbytes * 8 / weights
    took = f"{statistics.median(seconds) * 1e3:.1f} ms to convert {shape[0]} x {shape[1]}"
    return (
        f"{bits} bits as int4pack: {took}, {held:.2f} bits a weight in memory instead of "
        f"{stored:.2f}"
    )


def sheet(results: list[Result], *, rounds: int) -> Sheet:
    names = [each.name for each in CONTENDERS]
    columns = (
        "out x in",
        "bits",
        "tokens",
        "weights",
        f"{names[0]} us",
        *(f"{name}" for name in names[1:]),
    )
    rows = [
        (
            "x".join(map(str, result.shape)),
            result.bits,
            result.tokens,
            "cold" if result.is_cold else "hot",
            f"{result.us[names[0]]:.1f}",
            *(f"{result.ratios[name]:.2f}" if name in result.ratios else "" for name in names[1:]),
        )
        for result in results
    ]
    note = (
        f"ratios to bfloat16, medians of {rounds} interleaved rounds; one thread, x in bfloat16, "
        "groups of 128 at most"
    )
    return Sheet("Products with packed weights", columns, rows, note)


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        rounds=15,
        tokens=list(TOKENS),
        json=(Path, "write the figures to this file as well"),
    )
    parser.add_argument(
        "--bits", type=int, nargs="+", default=list(SCALAR_WIDTHS), choices=SCALAR_WIDTHS
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
