"""Products with trellis codes on a CPU: our kernels beside those of packed weights and bfloat16, by
rate and tokens.

    python -m tools.bench.kernels.trellis

Contenders take turns in rounds, as in `tools.bench.kernels.low_bit`; a ratio is that of one round. x is in
bfloat16.
"""

import statistics
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F

from moectl.show.render import Sheet, show_sheet
from runtime.kernels.cpu.replicas import low_bit, trellis
from tools.arguments import parser_of
from tools.bench.kernels.low_bit import are_cold, run_rounds, turning
from tools.gpu.checks import trellis as coded_matrices
from tools.gpu.checks.low_bit import copied, random_packed

SHAPES = ((1024, 2048), (1536, 2048), (2048, 768), (64, 128))
TOKENS = (1, 2, 4, 8, 16, 64)
NAMES = ("bfloat16", "packed", "packed, all", "trellis", "trellis, all")  # all: unpacked first

Product = Callable[[torch.Tensor], torch.Tensor]


def contenders(shape: tuple[int, int], bits: int, *, is_cold: bool) -> dict[str, Product]:
    """Return the product with a matrix [out, in] of each kind. If cold, it takes turns over
    matrices that together fit into no cache."""
    dense = torch.randn(shape).bfloat16()
    packed = random_packed(*shape, bits)
    coded = coded_matrices.random_trellis(*shape, 2 * bits, is_rotated=False)

    dense_ones = turning(dense, dense.nbytes, torch.clone, is_cold=is_cold)
    packed_ones = turning(packed, packed.nbytes, copied, is_cold=is_cold)
    coded_ones = turning(coded, coded.nbytes, coded_matrices.copied, is_cold=is_cold)
    ways: tuple[Product, ...] = (
        lambda x: F.linear(x, dense_ones()),
        lambda x: low_bit.multiply(x, packed_ones()),
        lambda x: F.linear(x, low_bit.dequantise(packed_ones(), x.dtype)),
        lambda x: trellis.multiply(x, coded_ones()),
        lambda x: trellis.multiply_unpacked(x, coded_ones()),
    )
    return dict(zip(NAMES, ways, strict=True))


def rows_of(shape: tuple[int, int], bits: int, tokens: list[int], rounds: int) -> list[tuple]:
    rows = []
    for is_cold in are_cold(shape):
        products = contenders(shape, bits, is_cold=is_cold)
        for count in tokens:
            x = torch.randn(count, shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
            seconds = run_rounds(x, products, rounds=rounds)
            plain, *rest = seconds.values()
            ratios = [statistics.median(np.divide(own, plain)) for own in rest]
            direct = statistics.median(np.divide(seconds["trellis"], seconds["packed"]))
            where = "cold" if is_cold else "hot"
            size = "x".join(map(str, shape))
            us = statistics.median(plain) * 1e6
            rows.append(
                (
                    size,
                    bits,
                    count,
                    where,
                    f"{us:.1f}",
                    *(f"{each:.2f}" for each in ratios),
                    f"{direct:.2f}",
                )
            )
    return rows


def main() -> None:
    options = parser_of(__doc__, rounds=15, bits=[1, 2, 3, 4], tokens=list(TOKENS)).parse_args()
    torch.set_num_threads(1)
    rows = [
        row
        for shape in SHAPES
        for bits in options.bits
        for row in rows_of(shape, bits, options.tokens, options.rounds)
    ]
    columns = ("out x in", "bits", "tokens", "weights", "bfloat16 us", *NAMES[1:], "to packed")
    note = (
        f"ratios to bfloat16, the last of trellis to packed; medians of {options.rounds} rounds "
        "in turns; one thread"
    )
    show_sheet(Sheet("Products with trellis codes", columns, rows, note))


if __name__ == "__main__":
    main()
