"""Replays a trace through the controller: the decisions of the live run, without the model, on
virtual time."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from artifacts.errors import BadInput
from artifacts.traces.trace import DECODE, PREFILL, Trace
from runtime.control.controller import Controller
from runtime.control.plan import Plan
from runtime.control.splits.resplit import Reconfiguration
from runtime.policies.step import Opening, Step, last_tokens
from runtime.replay.virtual_time import ReplayTiming


def replay(
    trace: Trace,
    controller: Controller,
    timing: ReplayTiming | None = None,
    *,
    reconfiguration: Reconfiguration | None = None,
    watch: Callable[[Step, Plan], None] | None = None,
) -> None:
    """Replay every step of `trace` in order; results are in `controller.counters` and `timing`.
    `watch` is called with every step and its plan."""
    if trace.num_layers > controller.shape.num_layers:
        raise BadInput(
            f"the trace has {trace.num_layers} layers, the model {controller.shape.num_layers}: "
            "it is another model's"
        )
    current = -1
    idle = _begin_idle(trace) if reconfiguration else frozenset()
    ordered, spans = replace(trace, experts=trace.experts.astype(np.int64)).scheduled()
    for pass_index, phase, layer, rows in spans:
        step = _step(ordered, rows, pass_index, phase, layer, controller)
        if pass_index != current:
            current = pass_index
            if pass_index in idle:
                reconfiguration.between_requests()
            if reconfiguration:
                reconfiguration.begin_pass(ordered.request[rows])
            controller.begin_pass(len(step.selected))
            if timing:
                timing.begin_pass(**_pass_of(ordered, rows))
            if controller.opens_passes:
                opened = controller.open_pass(Opening(pass_index, phase, step.embedding))
                if timing:
                    timing.open_pass(opened)
        if reconfiguration:
            reconfiguration.add(step)
        plan = controller.step(step)
        if timing:
            timing.step(plan)
        if watch:
            watch(step, plan)
    if timing:
        timing.end_pass()


def _pass_of(trace: Trace, rows: slice) -> dict[str, int]:
    """Return what `ReplayTiming` is told of a pass, by the rows of its first layer."""
    phases = trace.phase[rows]
    num_decoded = int((phases == DECODE).sum())
    num_prompts = len(np.unique(trace.request[rows][phases == PREFILL]))
    return {
        "num_tokens": len(phases),
        "num_decoded": num_decoded,
        "num_heads": num_decoded + num_prompts,
    }


def _begin_idle(trace: Trace) -> frozenset[int]:
    """Return the passes before which every request in progress has ended."""
    passes = trace.pass_indices()
    first, last = np.full((2, int(trace.request.max()) + 1), -1)
    order = np.argsort(passes, kind="stable")
    last[trace.request[order]] = passes[order]
    first[trace.request[order[::-1]]] = passes[order[::-1]]
    ends = np.zeros(int(passes.max()) + 1, np.int64)
    np.maximum.at(ends, first[first >= 0], last[first >= 0])
    open_until = np.maximum.accumulate(ends)
    begins = set(first[first >= 0].tolist())
    return frozenset(start for start in begins if start and open_until[start - 1] < start)


def _step(
    trace: Trace, rows: slice, pass_index: int, phase: int, layer: int, controller: Controller
) -> Step:
    """Return the step as the live run saw it, with predictions and embeddings only if policies read
    them."""
    predicted = learned = last = embedding = None
    if controller.num_predicted and trace.predicted is not None:
        predicted = trace.predicted[rows, : controller.num_predicted]
        last = last_tokens(trace.request[rows])
    if controller.num_learned and trace.learned is not None:
        learned = trace.learned[rows, : controller.num_learned]
        last = last_tokens(trace.request[rows])
    if controller.sees_embeddings and trace.iteration is not None:
        last = last_tokens(trace.request[rows])
        embedding = trace.embeddings[trace.iteration[rows][last]]
    return Step(
        pass_index=pass_index,
        phase=phase,
        layer=layer,
        selected=trace.experts[rows],
        weights=trace.weights[rows],
        probabilities=None if trace.probabilities is None else trace.probabilities[rows],
        predicted=predicted,
        learned=learned,
        last=last,
        embedding=embedding,
        requests=trace.request[rows],
        prompts=_prompts(trace.phase[rows]) if phase == PREFILL else None,
    )


def _prompts(phases: np.ndarray) -> np.ndarray | None:
    """Return which tokens [T] are of prompts; None where all are."""
    prompts = phases == PREFILL
    return None if prompts.all() else prompts
