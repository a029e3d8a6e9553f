"""Solves a split from a trace: the curves of its selections, the latencies of a machine, and
MoEpic's solver."""

from dataclasses import replace

import numpy as np

from artifacts.errors import BadInput
from artifacts.hardware.costs import Costs
from artifacts.shape import Shape
from artifacts.splits.solve import EVEN, SOLVERS, Answer, Latencies, SolvedSplit, SplitProblem
from artifacts.traces.curves import Curves, measure
from artifacts.traces.trace import DECODE, Trace
from runtime.policies.base import Eviction, Split

_EVEN = (1.0, 0.9, 0.8, 0.65, 0.5)


def latencies_of(costs: Costs, top_k: int) -> Latencies:
    """Return the latencies of one token. Where a segment takes as long to load as its expert, all
    of a load is latency."""
    per_byte_s = 0.0 if costs.reads_whole else costs.load_s
    return Latencies(
        attention_s=costs.rest.seconds(1),
        moe_s=top_k * costs.expert.seconds(1),
        head_s=costs.head.seconds(1),
        load_s=per_byte_s,
        latency_s=costs.load_latency_s + costs.load_s - per_byte_s,
        host_s=costs.host_s,
    )


def counted_phases(trace: Trace) -> list[int]:
    """Return the phases that curves are measured on: decoding, if the trace has any."""
    return [DECODE] if (trace.phase == DECODE).any() else sorted(set(trace.phase.tolist()))


def curves_of(trace: Trace, shape: Shape, eviction: Eviction) -> Curves:
    """Measure the curves of the counted phases, in caches that evict as `eviction` does; by lcp's
    defaults where it goes by more than counted uses. Raises BadInput when the trace does not have
    what that takes."""
    if trace.predicted is None:
        raise BadInput(
            "the trace does not hold what routers predict: record one with `moectl profile "
            "--trace`, or with `moectl run --prefetch next_gate --trace FILE`"
        )
    curves = measure(trace, shape, phases=counted_phases(trace), **(eviction.as_lcp or {}))
    unused = np.flatnonzero(curves.requests == 0).tolist()
    if unused:
        raise BadInput(
            f"layers {', '.join(map(str, unused))} never occur in the trace: it cannot tell what "
            "they need"
        )
    return curves


def solve(
    curves: Curves,
    shape: Shape,
    budget_nbytes: int,
    latencies: Latencies,
    *,
    solver: str,
    zeta: float,
) -> Answer:
    """Solve a split of `budget_nbytes`. Raises BadUsage."""
    return split_problem(curves, shape, latencies).allocate(
        budget_nbytes / shape.expert_nbytes, zeta, solver=solver
    )


def split_problem(curves: Curves, shape: Shape, latencies: Latencies) -> SplitProblem:
    """Return the problem that solvers solve, with as many predictions as `next_gate` uses: the
    number that a token selects."""
    k = shape.top_k
    used = (curves.hit, curves.prediction[:, :k], curves.prediction_hit[:, :k])
    return SplitProblem.of(latencies.first_window, latencies.times(k), used)


def answer_of(curves: Curves, shape: Shape, split: SolvedSplit) -> Answer:
    """Return a split with its cache sizes and the exposed seconds that the solver's model
    expects."""
    sizes = np.clip(np.rint(split.budgets / split.theta).astype(np.int64), 1, shape.num_experts)
    exposed = split_problem(curves, shape, split.latencies).exposed_with(split.budgets, sizes)
    return split.budgets, exposed, split.theta, sizes


def candidates(curves: Curves, shape: Shape, unsolved: SolvedSplit) -> list[SolvedSplit]:
    """Return the splits worth trying for a budget: those of the solvers, and all layers alike at
    some ratios."""
    splits = [solved_anew(curves, shape, replace(unsolved, solver=solver)) for solver in SOLVERS]
    budget = min(unsolved.budget_nbytes / shape.expert_nbytes / shape.num_layers, shape.num_experts)
    for theta in _EVEN:
        alike = {
            "budgets": np.full(shape.num_layers, budget),
            "theta": np.full(shape.num_layers, theta),
        }
        splits.append(replace(unsolved, **alike, solver=EVEN))
    return splits


def solved_anew(curves: Curves, shape: Shape, split: SolvedSplit) -> SolvedSplit:
    """Return `split` as it would be if it had been solved from these curves; it must have latencies
    and a solver."""
    assert split.latencies is not None, f"a split of unknown latencies, {split.source}"
    terms = {"solver": split.solver, "zeta": split.zeta}
    budgets, _, theta, _ = solve(curves, shape, split.budget_nbytes, split.latencies, **terms)
    return replace(split, budgets=budgets, theta=theta)


def receipt(split: Split | None, shape: Shape) -> dict[str, object]:
    """Describe a split by layer: the ratio at which experts are cut, in whole neurons, and tops in
    the fast tier; and its source."""
    if split is None:
        return {}
    neurons_by_layer = split.top_neurons.tolist()
    return {
        "theta": " ".join(
            f"{neurons / (shape.num_neurons or shape.expert_nbytes):.3g}"
            for neurons in neurons_by_layer
        ),
        "tops": " ".join(map(str, split.num_tops.tolist())),
        "bottoms": split.num_bottoms,
        "solved": split.solved.source if split.solved else "no",
    }
