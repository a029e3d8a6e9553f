"""Teacher-forced requests through a model, as a trace with everything that policies may require."""

from collections.abc import Sequence
from itertools import islice

import numpy as np

from artifacts.modelshapes.known import ModelShape, model_shape
from artifacts.traces.trace import Trace, concatenate
from moectl.bundled import demo_model
from moectl.shared.opening import open_quietly
from profilers.routing.observe import RoutingForesight, RoutingProfile, observe
from profilers.text.batches import Batching
from profilers.text.corpus import documents, token_sequences
from runtime.model.open import MoeModel
from runtime.session.session import Session, Settings

_REQUESTS = 32
_LENGTH = 80
_PREFILL = 32


def bundled_requests(*, distance: int) -> tuple[Trace, ModelShape, str]:
    """Held-out text through the bundled model: the trace, the model's shape, and a description of
    the source."""
    opened = open_quietly(str(demo_model()), device="cpu")
    whole = whole_requests(opened, "builtin:held-out", count=_REQUESTS, length=_LENGTH)
    source = (
        f"the bundled model on held-out text, requests of {_PREFILL} + {_LENGTH - _PREFILL} tokens"
    )
    return (
        told(opened, whole, prefill=_PREFILL, distance=distance),
        model_shape(str(demo_model())),
        source,
    )


def whole_requests(opened: MoeModel, data: str, *, count: int, length: int) -> list[np.ndarray]:
    """Up to `count` sequences of exactly `length` tokens of a data specification."""
    cut = token_sequences(
        documents(data, seed=0), opened.tokenizer, length=length, num_tokens=1000 * count * length
    )
    return list(islice((sequence for sequence in cut if len(sequence) == length), count))


def told(
    opened: MoeModel, sequences: Sequence[np.ndarray], *, prefill: int, distance: int
) -> Trace:
    """The routing of these sequences as consecutive requests, with predictions up to `distance`
    layers ahead."""
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
            keep_trace=RoutingForesight(distance),
        )
        return concatenate([trace for _, trace in parts])
