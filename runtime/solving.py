"""A split solved from a trace: curves of what it selects, latencies of a machine, and MoEpic's solver."""

from dataclasses import replace

import numpy as np

from artifacts.curves import Curves, measure
from artifacts.errors import BadInput
from artifacts.shape import Shape
from artifacts.splits import Answer, Latencies, SolvedSplit, allocate
from artifacts.trace import DECODE, Trace
from runtime.policies.base import Split
from runtime.timing import Costs


def latencies_of(costs: Costs, top_k: int) -> Latencies:
    """Those of one token."""
    return Latencies(
        attention_s=costs.rest.seconds(1),
        moe_s=top_k * costs.expert.seconds(1),
        head_s=costs.head.seconds(1),
        load_s=costs.load_s,
        latency_s=costs.load_latency_s + costs.host_s,
    )


def counted_phases(trace: Trace) -> list[int]:
    """Decoding, where there is any."""
    return [DECODE] if (trace.phase == DECODE).any() else sorted(set(trace.phase.tolist()))


def curves_of(trace: Trace, shape: Shape) -> Curves:
    """Of the counted phases. Raises BadInput where the trace cannot tell."""
    if trace.predicted is None:
        raise BadInput(
            "the trace does not hold what routers predict: record one with `moectl profile --trace`, or with "
            "`moectl run --prefetch next_gate --trace FILE`"
        )
    curves = measure(trace, shape, phases=counted_phases(trace))
    unused = np.flatnonzero(curves.requests == 0).tolist()
    if unused:
        raise BadInput(f"layers {', '.join(map(str, unused))} never occur in the trace: it cannot tell what they need")
    return curves


def solve(
    curves: Curves, shape: Shape, budget_nbytes: int, latencies: Latencies, *, solver: str, zeta: float
) -> Answer:
    """Raises BadUsage."""
    total = budget_nbytes / shape.expert_nbytes
    given = (*latencies.arguments(), shape.top_k, curves.hit, curves.prediction, curves.prediction_hit)
    return allocate(total, zeta, *given, solver=solver, latency_s=latencies.latency_s)


def solved_anew(curves: Curves, shape: Shape, split: SolvedSplit) -> SolvedSplit:
    """What `split` would be had it been solved from these curves; it must have latencies."""
    assert split.latencies is not None, f"a split of unknown latencies, {split.source}"
    terms = {"solver": split.solver, "zeta": split.zeta}
    budgets, _, theta, _ = solve(curves, shape, split.budget_nbytes, split.latencies, **terms)
    return replace(split, budgets=budgets, theta=theta)


def receipt(split: Split | None, shape: Shape) -> dict[str, object]:
    """By layer the ratio at which experts are cut, to whole neurons, and tops in the fast tier; and by what."""
    if split is None:
        return {}
    neurons_by_layer = split.top_neurons.tolist()
    return {
        "theta": " ".join(
            f"{neurons / (shape.num_neurons or shape.expert_nbytes):.3g}" for neurons in neurons_by_layer
        ),
        "tops": " ".join(map(str, split.num_tops.tolist())),
        "bottoms": split.num_bottoms,
        "solved": split.solved.source if split.solved else "no",
    }
