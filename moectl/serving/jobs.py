"""Jobs for the thread that runs the model, and the events it sends back."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from runtime.session.generate import Sampling


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The next text of an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an answer: `reason` is `stop` or `length`, `took` holds its counters and times."""

    reason: str
    num_tokens: int
    took: dict[str, object]


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed, maybe after some text; `status` is an HTTP status."""

    message: str
    status: int


Event = TextPiece | Done | Failed


@dataclass(slots=True, eq=False)
class GenerationJob:
    """A prompt [1, S] to continue. `tell` is called with each event on the thread that runs the model."""

    prompt: torch.Tensor
    sampling: Sampling
    stops: tuple[str, ...]
    tell: Callable[[Event], None]
    arrived_s: float = field(default_factory=time.perf_counter)
    has_left: bool = False  # the client has disconnected


@dataclass(slots=True, eq=False)
class Switch:
    """A switch to another preset after the earlier requests; `settled` gets None, or the error that prevents it."""

    preset: str
    settled: Future[None] = field(default_factory=Future)
