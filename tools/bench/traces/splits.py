"""Improvement of the split solvers over MoEpic's published greedy one, and the time of curves and
solvers.

    python -m tools.bench.traces.splits --trace FILE --num-experts 32
    python -m tools.bench.traces.splits --shape 24x60x4 64x256x8 --tokens 1000

Curves are of a recorded trace that holds predictions, or of a synthetic one for each `--shape`
(layers x experts x experts a token). Loading an expert takes 1, computing one `1 / --ratio`,
attention and the head a quarter each of what a layer's experts take; exposed times are in loads, a
token. Seconds are wall-clock, compiling left out.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from artifacts.shape import Shape
from artifacts.splits.solve import allocate, expert_split
from artifacts.traces.curves import Curves, measure
from artifacts.traces.parquet import read_parquet
from artifacts.traces.synthetic import Dials, generate
from artifacts.traces.trace import DECODE, Trace
from moectl.show.render import Sheet, show_sheet
from tools.arguments import parser_of


def main() -> None:
    options = _options()
    columns = (
        "layers x experts x k",
        "budget",
        "load / compute",
        "even",
        "greedy",
        "dynamic",
        "saved by dynamic",
    )
    columns += ("curves s", "greedy s", "dynamic s")
    rows = []
    for trace, shape in _traces(options):
        measure(trace.take(np.arange(shape.num_layers)), shape)  # compiles
        curves, curves_s = _timed(
            lambda trace=trace, shape=shape: measure(trace, shape, phases=(DECODE,))
        )
        for budget in options.budget:
            for ratio in options.ratio:
                name = f"{shape.num_layers}x{shape.num_experts}x{shape.top_k}"
                exposed, seconds = _solved(curves, shape, budget, ratio)
                even, greedy, dynamic = exposed
                saved = 1 - dynamic / greedy if greedy else 0.0
                rows.append(
                    (name, f"{budget:.0%}", ratio, *exposed, f"{saved:.1%}", curves_s, *seconds)
                )
    show_sheet(Sheet("Exposed time of a token, in loads of an expert", columns, rows))


def _solved(
    curves: Curves, shape: Shape, budget: float, ratio: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Exposed time with equal budgets and with each solver, and seconds of the solvers."""
    moe = shape.top_k / ratio
    given = (
        moe / 2,
        moe,
        moe / 4,
        1.0,
        shape.top_k,
        curves.hit,
        curves.prediction,
        curves.prediction_hit,
    )
    total = budget * shape.num_keys
    even = expert_split(np.full(shape.num_layers, total / shape.num_layers), *given)[0].sum()
    solved = [
        _timed(lambda solver=solver: allocate(total, 0.01, *given, solver=solver))
        for solver in ("greedy", "dynamic")
    ]
    return (even, *(answer[1].sum() for answer, _ in solved)), tuple(
        seconds for _, seconds in solved
    )


def _timed(work) -> tuple:
    started = time.perf_counter()
    return work(), time.perf_counter() - started


def _traces(options: argparse.Namespace) -> Iterator[tuple[Trace, Shape]]:
    if options.trace:
        trace = read_parquet(options.trace, num_experts=options.num_experts)
        yield trace, Shape(trace.num_layers, options.num_experts, trace.top_k, 1)
        return
    for text in options.shape:
        shape = Shape(*map(int, text.split("x")), 1)
        yield generate(Dials(tokens=options.tokens, requests=4, prompt=16), shape), shape


def _options() -> argparse.Namespace:
    return parser_of(
        __doc__,
        trace=Path,
        num_experts=32,
        shape=["24x60x4", "32x8x2", "64x256x8"],
        tokens=1000,
        budget=[0.125, 0.25, 0.5],
        ratio=[3.0, 10.0],
    ).parse_args()


if __name__ == "__main__":
    main()
