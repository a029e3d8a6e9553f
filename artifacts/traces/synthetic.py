"""Synthetic routing traces: five dials, any shape, and the same trace for the same seed.

R requests of T tokens each, L layers, E experts, K selected.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import isfinite

import numpy as np

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage
from artifacts.shape import Shape
from artifacts.traces.trace import DECODE, PREFILL, Trace

MOST_SKEW = 8.0
MOST_TOKENS = 10**8
_MOST_NOISE = 64.0
_SAMPLE = 4096
_HALVINGS = 20


@dataclass(frozen=True, slots=True)
class Dials:
    """`skew`: exponent of Zipf's law for the popularity of a layer's experts, 0 for equal
    popularity. `locality`: probability that an expert of a token serves the next token too.
    `similarity`: share of experts that are as popular in a request's answer as in its prompt.
    `predictability`: probability that an expert is among those predicted one layer before. `tokens`
    counts all requests together; the first `prompt` tokens of each request are prefilled; `batch`
    requests run together."""

    skew: float = 0.8
    locality: float = 0.4
    similarity: float = 0.9
    predictability: float = 0.7
    tokens: int = 2000
    requests: int = 8
    prompt: int = 32
    batch: int = 1
    seed: int = 0
    grading: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.skew <= MOST_SKEW:
            raise BadUsage(f"synthetic: skew is between 0 and {MOST_SKEW:g}, not {self.skew}")
        for name in ("locality", "similarity", "predictability", "grading"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadUsage(
                    f"synthetic: {name} is a chance between 0 and 1, not {getattr(self, name)}"
                )
        if min(self.requests, self.batch) < 1 or min(self.prompt, self.seed) < 0:
            raise BadUsage(
                "synthetic: requests and batch are at least 1, prompt and seed not negative"
            )
        if max(self.tokens, self.requests, self.prompt, self.batch) > MOST_TOKENS:
            raise BadUsage(
                f"synthetic: tokens, requests, prompt and batch are at most {MOST_TOKENS:,}"
            )
        if self.length <= self.prompt:
            raise BadUsage(
                f"synthetic: {self.tokens} tokens in {self.requests} requests leave nothing to "
                f"decode after prompts of {self.prompt}: give more tokens, or "
                f"prompt={max(0, self.length - 1)}"
            )

    def __str__(self) -> str:
        named = (field.name for field in fields(self) if field.name != "grading" or self.grading)
        return ",".join(f"{name}={getattr(self, name)}" for name in named)

    @property
    def length(self) -> int:
        """Tokens of a request."""
        return self.tokens // self.requests


def parse_dials(text: str) -> Dials:
    """Parse `skew=0.8,locality=0.4,...`; dials that are left out keep their defaults. Raises
    BadUsage."""
    kinds = {field.name: type(field.default) for field in fields(Dials)}
    given = {}
    for piece in filter(None, text.split(",")):
        name, _, value = piece.strip().partition("=")
        if name not in kinds:
            raise BadUsage(unknown("dial", name, kinds))
        try:
            given[name] = kinds[name](value)
        except ValueError:
            raise BadUsage(
                f"synthetic: {name} takes a value of type {kinds[name].__name__}, not {value!r}"
            ) from None
        if not isfinite(given[name]):
            raise BadUsage(f"synthetic: {name} takes a number, not {value!r}")
    return Dials(**given)


def generate(dials: Dials, shape: Shape, *, detailed: bool = True) -> Trace:
    """Generate a trace by the dials. Unless `detailed` it has no probabilities and no predictions,
    and is made faster.

    Every dial has its own random numbers, so turning one dial leaves unchanged what the others
    decide.
    """
    streams = [np.random.default_rng(seed) for seed in np.random.SeedSequence(dials.seed).spawn(5)]
    prompt, answer = _popularity(dials, shape, streams[0])
    order = _Rows(dials, shape)
    selected = np.empty((dials.length, dials.requests, shape.num_layers, shape.top_k), np.uint16)
    weights = np.empty(selected.shape, np.float32)
    probabilities = (
        np.empty((*selected.shape[:3], shape.num_experts), np.float32) if detailed else None
    )
    previous = None
    for token in range(dials.length):
        liked = prompt if token < dials.prompt else answer
        logits = liked + streams[1].gumbel(size=answer.shape)
        if previous is not None:
            kept = streams[2].random(previous.shape) < dials.locality
            logits = _lifted(logits, previous, kept, streams[2])
        chance = _softmax(logits)
        previous = _strongest(logits, shape.top_k)
        selected[token] = previous
        weights[token] = np.take_along_axis(chance, previous, axis=-1)
        if detailed:
            probabilities[token] = chance
    predicted = None
    if detailed:
        predicted = _predictions(dials, selected, answer, streams[3])
        if dials.grading:
            _grade(dials, predicted, selected, probabilities, streams[4])
    return Trace(
        **order.places(),
        experts=order.laid_out(selected),
        weights=order.laid_out(weights),
        probabilities=order.laid_out(probabilities) if detailed else None,
        predicted=order.laid_out(predicted)[:, None] if detailed else None,
    )


class _Rows:
    """The order of a trace's rows: by pass, layer, request and token."""

    def __init__(self, dials: Dials, shape: Shape) -> None:
        size = (dials.length, dials.requests, shape.num_layers)
        token, request, layer = (axis.ravel() for axis in np.indices(size, dtype=np.int32))
        decoded = np.maximum(token - dials.prompt + 1, 0) if dials.prompt else token
        per_batch = dials.length - dials.prompt + (1 if dials.prompt else 0)
        pass_ = request // dials.batch * per_batch + decoded
        self._order = np.lexsort((token, request, layer, pass_))
        phase = np.where(token < dials.prompt, PREFILL, DECODE).astype(np.uint8)
        self._places = {
            "request": request,
            "pass_": pass_,
            "phase": phase,
            "layer": layer,
            "token": token,
        }

    def places(self) -> dict[str, np.ndarray]:
        return {name: column[self._order] for name, column in self._places.items()}

    def laid_out(self, values: np.ndarray) -> np.ndarray:
        """[T, R, L, X] -> [N, X]."""
        return values.reshape(-1, values.shape[-1])[self._order]


def _popularity(
    dials: Dials, shape: Shape, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Log popularity [R, L, E] in prompts, equal for all requests, and in each request's answer."""
    size = (dials.requests, shape.num_layers, shape.num_experts)
    ranks = rng.permuted(
        np.tile(np.arange(1, shape.num_experts + 1), (shape.num_layers, 1)), axis=1
    )
    prompt = np.broadcast_to(-dials.skew * np.log(ranks), size)
    # Experts that differ swap places among themselves; both orders leave the others where they are.
    differs = rng.random(size) >= dials.similarity
    others = 2.0 + np.arange(shape.num_experts)
    origin = np.argsort(np.where(differs, np.linspace(0, 1, shape.num_experts), others), axis=-1)
    target = np.argsort(np.where(differs, rng.random(size), others), axis=-1)
    answer = np.empty(size)
    np.put_along_axis(answer, target, np.take_along_axis(prompt, origin, axis=-1), axis=-1)
    return prompt, answer


def _predictions(
    dials: Dials, selected: np.ndarray, liked: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return [T, R, L, E] distributions over the experts of the next layer; after the last layer,
    over the experts of the next token."""
    predicted = np.empty((*selected.shape[:3], liked.shape[-1]), np.float32)
    ahead = np.roll(liked, -1, axis=1)
    for token, ids in enumerate(_upcoming(selected)):
        upcoming = ids.astype(np.int64)
        logits = ahead + rng.gumbel(size=ahead.shape)
        right = rng.random(upcoming.shape) < dials.predictability
        sunk = logits.min(axis=-1, keepdims=True) - 1 - rng.random(upcoming.shape)
        np.put_along_axis(logits, upcoming, sunk, axis=-1)
        predicted[token] = _softmax(_lifted(logits, upcoming, right, rng))
    return predicted


def _grade(
    dials: Dials,
    predicted: np.ndarray,
    selected: np.ndarray,
    probabilities: np.ndarray,
    rng: np.random.Generator,
) -> None:
    """Replace predictions [T, R, L, E] by the next layer's logits plus noise, each with probability
    `grading`."""
    noise = _noise(dials.predictability, selected, probabilities, rng)
    for said, upcoming in zip(predicted, _upcoming(probabilities), strict=True):
        is_graded = rng.random(said.shape[:-1]) < dials.grading
        logits = _logits(upcoming[is_graded])
        said[is_graded] = _softmax(logits + noise * rng.standard_normal(logits.shape))


def _noise(
    wanted: float, selected: np.ndarray, probabilities: np.ndarray, rng: np.random.Generator
) -> float:
    """Return the standard deviation of noise with which the K largest logits are the `wanted` share
    of the selected experts, by bisection on some of the tokens."""
    every = len(selected.reshape(-1, selected.shape[-1])) // _SAMPLE + 1
    ids = selected.reshape(-1, selected.shape[-1])[::every].astype(np.int64)
    logits = _logits(probabilities.reshape(-1, probabilities.shape[-1])[::every])
    drawn = rng.standard_normal(logits.shape)
    low = 0.0
    high = _MOST_NOISE
    if wanted == 1:
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        named = np.zeros(logits.shape, bool)
        np.put_along_axis(named, _strongest(logits + middle * drawn, ids.shape[-1]), True, axis=-1)
        is_more = np.take_along_axis(named, ids, axis=-1).mean() > wanted
        low, high = (middle, high) if is_more else (low, middle)
    return low


def _upcoming(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yield for each token of [T, R, L, X] what the next layer has, [R, L, X]. After a request's
    last token nothing follows, so the last token repeats."""
    for token in range(len(values)):
        following = values[min(token + 1, len(values) - 1)]
        yield np.concatenate([values[token][:, 1:], following[:, :1]], axis=1)


def _lifted(
    logits: np.ndarray, ids: np.ndarray, chosen: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Raise the `chosen` ones of `ids` above all others, in random order."""
    unlifted = np.take_along_axis(logits, ids, axis=-1)
    above = logits.max(axis=-1, keepdims=True) + rng.random(ids.shape)
    np.put_along_axis(logits, ids, np.where(chosen, above, unlifted), axis=-1)
    return logits


def _strongest(logits: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest logits, largest first."""
    ids = np.argpartition(-logits, count - 1, axis=-1)[..., :count]
    order = np.argsort(-np.take_along_axis(logits, ids, axis=-1), axis=-1)
    return np.take_along_axis(ids, order, axis=-1)


def _logits(probabilities: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(probabilities, np.finfo(np.float32).tiny, dtype=np.float64))


def _softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)
