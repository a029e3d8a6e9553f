"""Hit rates of every eviction policy on traces, beside Belady, and the share of the gap that
horizon closes.

    moectl profile --data TEXT --trace ...
    python -m tools.bench.traces.eviction mixed.parquet prose.parquet --num-experts 32 --sizes 6,12,25,50
    python -m tools.bench.traces.eviction mixed.parquet --num-experts 32 --prefetch next_gate --window 2

A row is a trace, a scope and a size; `gap closed` is horizon's place between the best of the others
(0) and Belady (1). With prefetching Belady is no bound (it keeps what would be prefetched anyway),
and the column is horizon's hit rate less that of the best other, in points.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from artifacts.shape import Shape
from artifacts.traces.next_use import NextUse
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import Trace
from moectl.show.render import Sheet, show_sheet
from runtime.control.build import build_controller
from runtime.control.counters import hit_rate
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.presets import Scope, preset
from runtime.replay.replay import replay
from tools.arguments import parser_of

RIVALS = ("lru", "lfu", "lcp", "least_stale", "least_stale:within=ascending", "fld", "score")


def main() -> None:
    options = _options()
    rows = [row for path in options.traces for row in compare(path, options)]
    if options.json:
        print(json.dumps(rows))
        return
    names = [name for name in rows[0] if name not in ("trace", "scope", "size", "closed")]
    closed = "gap closed" if options.prefetch == "none" else "points over best"
    show_sheet(
        Sheet(
            f"hit rates, prefetch {options.prefetch}",
            (
                "trace",
                "scope",
                "size",
                *(name.replace("least_stale:within=", "stale ") for name in names),
                closed,
            ),
            tuple(
                (
                    row["trace"],
                    row["scope"],
                    f"{row['size']:.0%}",
                    *(f"{row[name]:.3f}" for name in names),
                    row["closed"],
                )
                for row in rows
            ),
        )
    )


def compare(path: Path, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One row for each scope and size."""
    trace = read_parquet(path, num_experts=options.num_experts)
    shape = Shape(trace.num_layers, options.num_experts, trace.experts.shape[1], 1)
    names = [
        name
        for name in (*RIVALS, "horizon", "belady")
        if name != "score" or trace.probabilities is not None
    ]
    future = NextUse.of(trace, shape)
    for scope in options.scopes:
        for size in options.sizes:
            slots = round(shape.num_keys * size)
            rates = {
                name: _rate(
                    trace, shape, future, eviction=name, slots=slots, scope=scope, options=options
                )
                for name in names
            }
            yield {
                "trace": path.stem,
                "scope": scope,
                "size": size,
                **rates,
                "closed": _closed(rates, options),
            }


def _closed(rates: dict[str, float], options: argparse.Namespace) -> str:
    best = max(rate for name, rate in rates.items() if name not in ("horizon", "belady"))
    if options.prefetch != "none":
        return f"{100 * (rates['horizon'] - best):+.1f}"
    # If a token selects the whole scope there is nothing to choose, and the ratio is noise of the
    # prompts.
    return (
        f"{(rates['horizon'] - best) / (rates['belady'] - best):.2f}"
        if rates["belady"] - best > 0.005
        else "-"
    )


def _rate(
    trace: Trace,
    shape: Shape,
    future: NextUse,
    *,
    eviction: str,
    slots: int,
    scope: str,
    options: argparse.Namespace,
) -> float:
    owner = build_controller(
        build(preset("on-demand").texts() | {"eviction": eviction, "prefetch": options.prefetch}),
        shape,
        num_slots=slots,
        scope=Scope(scope),
        window=options.window * shape.expert_nbytes,
        artefacts=Artefacts(next_use=future),
    )
    replay(trace, owner)
    return hit_rate(owner.counters.totals())


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        prefetch=("none", "the traces must hold predictions for any other"),
        window=(2, "experts that the link brings ahead during a layer"),
        json=False,
    )
    parser.add_argument("traces", nargs="+", type=Path, help="Parquet traces of one model")
    parser.add_argument("--num-experts", type=int, required=True, help="of each layer")
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default="6.25,12.5,25,50",
        help="of the cache, per cent of all experts",
    )
    parser.add_argument("--scopes", nargs="+", default=list(Scope), choices=list(Scope))
    return parser.parse_args()


def _sizes(text: str) -> list[float]:
    return [float(part) / 100 for part in text.split(",")]


if __name__ == "__main__":
    main()
