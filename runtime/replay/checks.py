"""Checks of a trace against a model and of policies against a trace, before a replay."""

import numpy as np

from artifacts.errors import BadInput
from artifacts.modelshapes.known import ModelShape
from artifacts.traces.trace import Trace
from runtime.policies import POLICIES, Policies, describe


def check_model(trace: Trace, model: ModelShape) -> None:
    """Raise BadInput when the trace cannot be one of this model."""
    shape = model.shape
    highest = int(trace.experts.max())
    if highest >= shape.num_experts:
        raise BadInput(
            f"the trace selects expert {highest}, but a layer has only {shape.num_experts} experts "
            f"(0 to {shape.num_experts - 1})"
        )
    if (trace.num_layers, trace.top_k) != (shape.num_layers, shape.top_k):
        raise BadInput(
            f"the trace has {trace.num_layers} layers and {trace.top_k} experts per token, "
            f"{model.name} {shape.num_layers} and {shape.top_k}: it is another model's"
        )


def check_columns(trace: Trace, policies: Policies) -> None:
    """Raise BadInput when a policy reads what the trace does not hold."""
    prefetch = policies.prefetch
    text = describe(prefetch)
    deep = min(prefetch.distance, trace.num_layers)
    for is_read, held, source, reach in (
        (prefetch.reads_predictions, trace.predicted, "predictions", prefetch.distance),
        (prefetch.reads_learned, trace.learned, "what fitted predictors say", deep),
    ):
        if is_read and (held is None or held.shape[1] < reach):
            raise BadInput(
                f"prefetch {text} needs {source} {reach} layers ahead, which the trace does not "
                f"hold: record one with `moectl run --prefetch {text} --trace FILE`, or use "
                "--prefetch none"
            )
    for axis in POLICIES:
        policy = getattr(policies, axis)
        if policy.sees_embeddings and trace.iteration is None:
            raise BadInput(
                f"{axis} {describe(policy)} needs what each pass was given, "
                "which the trace does not hold: record one with `moectl run --trace FILE`"
            )
        if policy.sees_probabilities and trace.probabilities is None:
            raise BadInput(
                f"{axis} {describe(policy)} needs the routers' probabilities, "
                "which the trace does not hold: record one with `moectl run --trace FILE`"
            )


def unused_layers(trace: Trace) -> list[str]:
    unused = sorted(set(range(trace.num_layers)) - set(np.unique(trace.layer).tolist()))
    if not unused:
        return []
    named = ", ".join(map(str, unused))
    return [
        f"layers {named} never occur in the trace and have their share of the budget all the same"
    ]
