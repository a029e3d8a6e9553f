"""The pictures of docs/concepts.md, drawn from the trace that the tests replay: what the bundled model's routers said.

    python -m tools.docs.concept_pictures docs/pictures

All values are counts: the same trace gives the same bytes.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from artifacts.shape import Shape
from artifacts.traces.next_use import NextUse
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import DECODE, Trace
from moectl.show.charts import Line, heatmap, lines
from moectl.show.pictures import WIDTH, write_picture
from moectl.show.svg import Drawing, Frame, linear_scale
from runtime.control.build import build_controller
from runtime.control.counters import hit_rate
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.presets import Scope, preset
from runtime.replay.replay import replay
from tools import TRACE

NUM_EXPERTS = 32
EVICTIONS = {"random": "quiet", "lru": "strong", "lfu": "fresh", "horizon": "warm", "belady": "ink"}
SHARES = (0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.75)
LAYER, TOKENS = 4, 96


def main() -> None:
    folder = Path(sys.argv[1])
    trace = read_parquet(TRACE, num_experts=NUM_EXPERTS)
    drawn: dict[str, Callable[[Trace], Drawing]] = {"routing": routing, "skew": skew, "hit-rates": hit_rates}
    for name, draw in drawn.items():
        write_picture(draw(trace), folder / f"{name}.svg")


def routing(trace: Trace) -> Drawing:
    """The experts of one layer that each decoded token selected."""
    selected = trace.experts[(trace.layer == LAYER) & (trace.phase == DECODE)][:TOKENS]
    matrix = np.zeros((NUM_EXPERTS, len(selected)))
    matrix[selected.T, np.arange(len(selected))] = 1
    title = f"Layer {LAYER}: the {selected.shape[1]} experts that each token takes"
    return heatmap(title, matrix.tolist(), top=1, row="expert", column="decoded token", says=title, width=WIDTH)


def skew(trace: Trace) -> Drawing:
    """The share of all requests that the most used experts of each layer have."""
    frame = Frame(width=WIDTH)
    x = linear_scale(NUM_EXPERTS, name="most used experts of a layer", **frame.across)
    y = linear_scale(1.0, name="share of requests", **frame.upwards)
    drawn = [Line([(0, 0), (NUM_EXPERTS, 1)], "quiet", is_dashed=True)]
    for layer in range(trace.num_layers):
        counts = np.sort(np.bincount(trace.experts[trace.layer == layer].ravel(), minlength=NUM_EXPERTS))[::-1]
        drawn.append(Line(list(enumerate([0.0, *(np.cumsum(counts) / counts.sum()).tolist()])), "strong"))
    title = "A line for each layer; dashed: if all experts were used alike"
    return lines(title, drawn, x, y, frame, says=title)


def hit_rates(trace: Trace) -> Drawing:
    """Hit rates of eviction policies by budget, from random choice to the oracle."""
    shape = Shape(trace.num_layers, NUM_EXPERTS, trace.top_k, expert_nbytes=1)
    frame = Frame(width=WIDTH, right=100)
    x = linear_scale(0.8, name="share of the experts in the fast tier", shown="{:.0%}".format, **frame.across)
    y = linear_scale(1.0, name="hit rate", **frame.upwards)
    drawn = [
        Line([(share, _hit_rate(trace, shape, name, share)) for share in SHARES], colour, name, has_dots=True)
        for name, colour in EVICTIONS.items()
    ]
    title = "How often a wanted expert is resident, without prefetching"
    return lines(title, drawn, x, y, frame, says=f"{title}: {', '.join(EVICTIONS)}")


def _hit_rate(trace: Trace, shape: Shape, eviction: str, share: float) -> float:
    policies = build(preset("on-demand").texts() | {"eviction": eviction})
    artefacts = Artefacts(next_use=NextUse.of(trace, shape))
    slots = round(share * shape.num_keys)
    known = {"num_slots": slots, "shadows": None, "split": None, "scope": Scope.GLOBAL, "window": 0}
    controller = build_controller(policies, shape, artefacts=artefacts, **known)
    replay(trace, controller)
    return hit_rate(controller.counters.totals())


if __name__ == "__main__":
    main()
