"""Cost of making the replicas of one expert: all widths against one, and seconds at shapes of
published models.

    OMP_NUM_THREADS=1 python -m tools.bench.quality.gptq
    OMP_NUM_THREADS=1 python -m tools.bench.quality.gptq --shapes lab --rounds 20

An expert is made as `moectl quantize` makes it: the Hessian of its tokens, gate and up stacked, its
activations, their Hessian, down. All four widths and 4 bits alone take turns, so that what else the
machine does falls on both alike, and the ratio is that of the medians; it depends on how many
tokens share the cost of the Hessians, so that of the solver by itself stands beside it. Times are
of the processor, of one thread. The second table is scaled from parts: costs grow with tokens and
rows, and beyond 4,096 inputs what multiplies with the Hessian with their square, its factor with
their cube.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from artifacts.quantisation.bit_allocation import prefix_split
from artifacts.quantisation.gptq import RECIPES, group_size_for, hessian, quantize
from artifacts.quantisation.widths import USUAL_WIDTHS
from moectl.show.render import Sheet, show_sheet
from tools.arguments import parser_of


@dataclass(frozen=True, slots=True)
class Expert:
    """A gated expert's hidden and intermediate size, how many a model has, and calibration tokens
    of each."""

    hidden: int
    intermediate: int
    num_experts: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a matrix: of its Hessian per token, of its factorisation and other fixed work, and
    per row."""

    token_s: float
    factor_s: float
    row_s: float

    def scaled(self, factor: float) -> "Cost":
        """The cost with `factor` times the inputs."""
        return Cost(self.token_s * factor**2, self.factor_s * factor**3, self.row_s * factor**2)

    def total(self, num_tokens: int, num_rows: int) -> float:
        return self.token_s * num_tokens + self.factor_s + self.row_s * num_rows


# 128 samples of 2,048 tokens, as published: an expert sees top-k of its layer's experts of them.
PUBLISHED = 128 * 2048
SHAPES = {
    "lab": Expert(128, 96, 256, 2048),
    "olmoe": Expert(2048, 1024, 1024, PUBLISHED * 8 // 64),
    "mixtral": Expert(4096, 14336, 256, PUBLISHED * 2 // 8),
    "large": Expert(7168, 2048, 60 * 256, PUBLISHED * 8 // 256),
}
SCALED_ALONE = ("mixtral", "large")  # a whole expert of these takes too long
# Limits on the inputs, rows and tokens that are run of a shape.
LARGEST_INPUTS = 4096
LARGEST_ROWS = 1024
LARGEST_TOKENS = 4096


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    rows = [
        ratio_row(name, SHAPES[name], options)
        for name in options.shapes
        if name not in SCALED_ALONE
    ]
    head = ("shape", "tokens", "all widths s", "4 bits s", "ratio", "solver alone")
    if rows:
        show_sheet(
            Sheet("One expert: four widths against one, medians of paired runs", head, tuple(rows))
        )
    rows = [scaled_row(name, SHAPES[name], options.recipe) for name in options.shapes]
    head = ("shape", "expert s", "of it Hessians s", "experts", "hours on 1 core", "on 2")
    show_sheet(Sheet("All widths of one expert and of all, scaled from parts", head, tuple(rows)))
    loss = -np.sort(-np.random.default_rng(0).random((256, 4)), axis=1)
    times = [
        1e3 * _seconds(lambda average=average: prefix_split(loss, average))
        for average in np.linspace(1, 4, 61)
    ]
    print(
        f"prefix_split, 256 experts: {statistics.median(times):.2f} ms, at most {max(times):.2f} ms"
    )


def ratio_row(name: str, shape: Expert, options: argparse.Namespace) -> tuple[str, ...]:
    """All widths against one, for whole experts and for the solver alone."""
    weights = _weights(shape, shape.tokens)
    runs = [
        [_expert(*weights, bits, options.recipe) for bits in (USUAL_WIDTHS, (4,))]
        for _ in range(options.rounds)
    ]
    medians = np.median(np.array(runs), axis=0)
    (all_s, all_alone_s), (one_s, one_alone_s) = medians
    numbers = (
        f"{all_s:.3f}",
        f"{one_s:.3f}",
        f"{all_s / one_s:.2f}",
        f"{all_alone_s / one_alone_s:.2f}",
    )
    return (name, f"{shape.tokens:,}", *numbers)


def scaled_row(name: str, shape: Expert, recipe: str) -> tuple[str, ...]:
    """Return the seconds of an expert from the seconds of its parts, and of all experts of the
    model."""
    first = cost_of(shape.hidden, recipe)
    second = cost_of(shape.intermediate, recipe)
    seconds = first.total(shape.tokens, 2 * shape.intermediate) + second.total(
        shape.tokens, shape.hidden
    )
    hessians = (first.token_s + second.token_s) * shape.tokens
    hours = seconds * shape.num_experts / 3600
    return (
        name,
        f"{seconds:.3g}",
        f"{hessians:.3g}",
        f"{shape.num_experts}",
        f"{hours:.3g}",
        f"{hours / 2:.3g}",
    )


def cost_of(num_inputs: int, recipe: str) -> Cost:
    """The measured cost; above LARGEST_INPUTS measured at that size and scaled."""
    size = min(num_inputs, LARGEST_INPUTS)
    inputs = torch.randn(LARGEST_TOKENS, size)
    weight = torch.randn(LARGEST_ROWS, size) * 0.02
    metric = hessian(inputs)
    token_s = _seconds(lambda: hessian(inputs)) / len(inputs)

    def solve(num_rows: int) -> float:
        rows = weight[:num_rows]
        return min(
            _seconds(
                lambda: quantize(rows, metric, USUAL_WIDTHS, group_size_for(size), recipe=recipe)
            )
            for _ in range(2)
        )

    half = solve(LARGEST_ROWS // 2)
    full = solve(LARGEST_ROWS)
    row_s = (full - half) / (LARGEST_ROWS / 2)
    return Cost(token_s, max(0.0, full - row_s * LARGEST_ROWS), row_s).scaled(num_inputs / size)


def _weights(shape: Expert, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_tokens, shape.hidden, generator=random)
    gate_up = torch.randn(2 * shape.intermediate, shape.hidden, generator=random) * 0.02
    return inputs, gate_up, torch.randn(shape.hidden, shape.intermediate, generator=random) * 0.02


def _expert(
    inputs: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    bits: tuple[int, ...],
    recipe: str,
) -> tuple[float, float]:
    """Seconds of a whole expert, and of the solver in it."""
    start = time.process_time()
    first = hessian(inputs)
    gate, up = (inputs @ gate_up.T).chunk(2, dim=-1)
    second = hessian(torch.nn.functional.silu(gate) * up)
    middle = time.process_time()
    for weight, metric in ((gate_up, first), (down, second)):
        quantize(weight, metric, bits, group_size_for(weight.shape[1]), recipe=recipe)
    end = time.process_time()
    return end - start, end - middle


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--recipe", default="refined", choices=RECIPES)
    return parser.parse_args()


if __name__ == "__main__":
    main()
