"""Teacher-forced requests through a model, as a trace with everything that policies may require."""

from collections.abc import Sequence
from functools import cache
from itertools import islice

import numpy as np

from artifacts.modelshapes.known import ModelShape, model_shape
from artifacts.routing.predictors import Predictors
from artifacts.traces.trace import Trace, concatenate
from moectl.bundled import demo_model
from moectl.shared.opening import open_quietly
from profilers.routing.observe import RoutingForesight, RoutingProfile, observe
from profilers.routing.predictor_fit import RidgeFit, tuned_weights
from profilers.routing.predictors import PredictorPlan, observe_inputs
from profilers.text.batches import Batching
from profilers.text.corpus import documents, token_sequences
from runtime.engine.fitted_predictor import Predictor
from runtime.model.open import MoeModel
from runtime.session.session import Session, Settings

_REQUESTS = 32
_LENGTH = 80
_PREFILL = 32
# requests that predictors are fitted on, and that choose their targets
_FITTED = 64
_TUNED = 16


def bundled_requests(
    *, distance: int, data: str = "builtin:held-out", count: int = _REQUESTS
) -> tuple[Trace, ModelShape, str]:
    """Text through the bundled model, with predictions of routers and of predictors fitted on
    other text: the trace, the model's shape, and a description of the source."""
    opened, predictor = _bundled()
    whole = whole_requests(opened, data, count=count, length=_LENGTH)
    source = (
        f"the bundled model on held-out text, requests of {_PREFILL} + {_LENGTH - _PREFILL} tokens"
    )
    return (
        told(opened, whole, prefill=_PREFILL, distance=distance, predictor=predictor),
        model_shape(str(demo_model())),
        source,
    )


@cache
def _bundled() -> tuple[MoeModel, Predictor]:
    opened = open_quietly(str(demo_model()), device="cpu")
    return opened, _fitted(opened)


def _fitted(opened: MoeModel) -> Predictor:
    """Fit ProMoE's predictors of the next layer, as `moectl build-predictor` does, on the end of
    the text that the model was trained on."""
    sequences = whole_requests(opened, "builtin", count=_FITTED + _TUNED, length=_LENGTH)
    batches = Batching(batch=16, length=_LENGTH).batches(sequences[::-1])
    plan = PredictorPlan(distance=1)
    with Session(opened, Settings(preset="full")) as session:
        observed = [inputs for _, inputs in observe_inputs(session, batches, plan.distance)]
    fit = RidgeFit(opened.shape, distance=plan.distance, num_features=plan.features, seed=0)
    fitted = _FITTED // 16
    for inputs in observed[:fitted]:
        fit.add(inputs)
    weights, _ = tuned_weights(fit, observed[fitted:])
    predictors = Predictors(fit.scale, weights, plan.features, 0)
    return Predictor(predictors, plan.distance, opened.model.device)


def whole_requests(opened: MoeModel, data: str, *, count: int, length: int) -> list[np.ndarray]:
    """Up to `count` sequences of exactly `length` tokens of a data specification."""
    cut = token_sequences(
        documents(data, seed=0), opened.tokenizer, length=length, num_tokens=1000 * count * length
    )
    return list(islice((sequence for sequence in cut if len(sequence) == length), count))


def told(
    opened: MoeModel,
    sequences: Sequence[np.ndarray],
    *,
    prefill: int,
    distance: int,
    predictor: Predictor | None = None,
) -> Trace:
    """The routing of these sequences as consecutive requests, with predictions up to `distance`
    layers ahead, and those of a fitted `predictor`."""
    batches = Batching(batch=16, length=max(map(len, sequences)), prefill=prefill).batches(
        sequences
    )
    profile = RoutingProfile(opened.shape.num_layers, opened.shape.num_experts)
    with Session(opened, Settings(preset="full")) as session:
        parts = observe(
            session,
            batches,
            prefill=prefill,
            profile=profile,
            keep_trace=RoutingForesight(distance, predictor),
        )
        return concatenate([trace for _, trace in parts])
