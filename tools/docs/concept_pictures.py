"""The pictures of docs/concepts.md, drawn from the trace that the tests replay: what the bundled model's routers said.

    python -m tools.docs.concept_pictures docs/pictures

Everything is counted, nothing timed: the same trace gives the same bytes.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from artifacts.common.files import replacing
from artifacts.shape import Shape
from artifacts.traces.next_use import NextUse
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import DECODE, Trace
from runtime.control.build import build_controller
from runtime.control.counters import hit_rate
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.presets import Scope, preset
from runtime.replay.replay import replay
from tools import TRACE

NUM_EXPERTS = 32
EVICTIONS = {"random": "#9aa4b2", "lru": "#3b6ea5", "lfu": "#5aa469", "horizon": "#e07b39", "belady": "#24292f"}
SHARES = (0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.75)
LAYER, TOKENS = 4, 96


def main() -> None:
    folder = Path(sys.argv[1])
    trace = read_parquet(TRACE, num_experts=NUM_EXPERTS)
    for name, draw in (("routing", draw_routing), ("skew", draw_skew), ("hit-rates", draw_hit_rates)):
        figure = Figure(figsize=(8, 3.4), layout="constrained", facecolor="white")
        draw(figure.subplots(), trace)
        with replacing(folder / f"{name}.svg") as temporary, rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
            figure.savefig(temporary, format="svg", metadata={"Date": None})


def draw_routing(axes: Axes, trace: Trace) -> None:
    """Which experts of one layer each decoded token took."""
    taken = trace.experts[(trace.layer == LAYER) & (trace.phase == DECODE)][:TOKENS]
    for token, experts in enumerate(taken.tolist()):
        axes.scatter([token] * len(experts), experts, s=9, marker="s", color=EVICTIONS["lru"], linewidths=0)
    axes.set(xlabel="decoded token", ylabel="expert", xlim=(-1, TOKENS), ylim=(-1, NUM_EXPERTS))
    axes.set_title(f"layer {LAYER}: the {taken.shape[1]} experts that each token takes", loc="left", fontsize=11)


def draw_skew(axes: Axes, trace: Trace) -> None:
    """What share of all requests the most used experts of each layer have."""
    for layer in range(trace.num_layers):
        counts = np.sort(np.bincount(trace.experts[trace.layer == layer].ravel(), minlength=NUM_EXPERTS))[::-1]
        share = np.concatenate(([0], np.cumsum(counts) / counts.sum()))
        axes.plot(np.arange(NUM_EXPERTS + 1), share, color=EVICTIONS["lru"], alpha=0.5, linewidth=1)
    axes.plot([0, NUM_EXPERTS], [0, 1], color=EVICTIONS["random"], linewidth=1, linestyle="--")
    axes.set(xlabel="most used experts of a layer", ylabel="share of requests", xlim=(0, NUM_EXPERTS), ylim=(0, 1))
    axes.set_title("a line for each layer; dashed: if all were used alike", loc="left", fontsize=11)


def draw_hit_rates(axes: Axes, trace: Trace) -> None:
    """Hit rates by budget: policies between chance and what knows the future."""
    shape = Shape(trace.num_layers, NUM_EXPERTS, trace.top_k, expert_nbytes=1)
    for name, colour in EVICTIONS.items():
        rates = [_hit_rate(trace, shape, name, share) for share in SHARES]
        axes.plot(SHARES, rates, color=colour, marker="o", markersize=3, label=name)
    axes.set(xlabel="share of the experts in the fast tier", ylabel="hit rate", xlim=(0, 0.8), ylim=(0, 1))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes.set_title("how often a wanted expert is there, without prefetching", loc="left", fontsize=11)


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
