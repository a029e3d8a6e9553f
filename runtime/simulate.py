"""Replays a trace through the controller: the decisions of the live run, without the model, on virtual time."""

from dataclasses import replace

import numpy as np

from artifacts.errors import BadInput
from artifacts.trace import Trace, TraceStep
from runtime.controller import Controller
from runtime.policies.base import Step, last_tokens
from runtime.timing import Timing


def replay(trace: Trace, controller: Controller, timing: Timing | None = None) -> None:
    """Take every step of `trace` in order; `controller.counters` and `timing` then tell what happened."""
    if trace.num_layers > controller.shape.num_layers:
        raise BadInput(
            f"the trace has {trace.num_layers} layers, the model {controller.shape.num_layers}: it is another model's"
        )
    pass_index = -1
    for traced in replace(trace, experts=trace.experts.astype(np.int64)).steps():
        if traced.pass_index != pass_index:
            pass_index = traced.pass_index
            controller.begin_pass(len(traced.experts))
            if timing:
                timing.begin_pass(traced.phase, len(traced.experts))
        plan = controller.step(_step(traced, controller.num_predicted))
        if timing:
            timing.step(plan)
    if timing:
        timing.end_pass()


def _step(traced: TraceStep, num_predicted: int) -> Step:
    """What the live run saw: predictions only as far as the prefetch policy asked for them."""
    predicted = traced.predicted[:, :num_predicted] if num_predicted and traced.predicted is not None else None
    return Step(
        pass_index=traced.pass_index,
        phase=traced.phase,
        layer=traced.layer,
        selected=traced.experts,
        weights=traced.weights,
        probabilities=traced.probabilities,
        predicted=predicted,
        last=last_tokens(traced.request),
    )
