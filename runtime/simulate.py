"""Replays a trace through the controller: the decisions of the live run, without the model, on virtual time."""

from dataclasses import replace

import numpy as np

from artifacts.errors import BadInput
from artifacts.trace import Trace
from runtime.controller import Controller
from runtime.policies.base import Step, last_tokens
from runtime.timing import Timing


def replay(trace: Trace, controller: Controller, timing: Timing | None = None) -> None:
    """Take every step of `trace` in order; `controller.counters` and `timing` then tell what happened."""
    if trace.num_layers > controller.shape.num_layers:
        raise BadInput(
            f"the trace has {trace.num_layers} layers, the model {controller.shape.num_layers}: it is another model's"
        )
    current = -1
    ordered, spans = replace(trace, experts=trace.experts.astype(np.int64)).scheduled()
    for pass_index, phase, layer, rows in spans:
        step = _step(ordered, rows, pass_index, phase, layer, controller)
        if pass_index != current:
            current = pass_index
            controller.begin_pass(len(step.selected))
            if timing:
                timing.begin_pass(phase, len(step.selected))
        plan = controller.step(step)
        if timing:
            timing.step(plan)
    if timing:
        timing.end_pass()


def _step(trace: Trace, rows: slice, pass_index: int, phase: int, layer: int, controller: Controller) -> Step:
    """What the live run saw: predictions and embeddings only as far as policies asked for them."""
    predicted = learned = last = embedding = None
    if controller.num_predicted and trace.predicted is not None:
        predicted, last = trace.predicted[rows, : controller.num_predicted], last_tokens(trace.request[rows])
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
        last=last,
        embedding=embedding,
    )
    if controller.num_learned and trace.learned is not None:
        learned, last = trace.learned[rows, : controller.num_learned], last_tokens(trace.request[rows])
        learned=learned,
