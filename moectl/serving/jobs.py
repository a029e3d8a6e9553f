"""What the thread that runs the model is asked for, and what it tells of it."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from runtime.session.generate import Sampling


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that an answer goes on with."""

    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an answer: by `stop` or `length`, and what it took."""

    reason: str
    num_tokens: int
    took: dict[str, object]


@dataclass(frozen=True, slots=True)
class Failed:
    """There is no answer, or no more of it; `status` as HTTP has them."""

    message: str
    status: int


Event = Piece | Done | Failed


@dataclass(slots=True, eq=False)
class Job:
    """A prompt [1, S] to be gone on from; `tell` hears of every event, on the thread that runs the model."""

    prompt: torch.Tensor
    sampling: Sampling
    stops: tuple[str, ...]
    tell: Callable[[Event], None]
    arrived_s: float = field(default_factory=time.perf_counter)
    has_left: bool = False  # nobody waits for the answer any more


@dataclass(slots=True, eq=False)
class Switch:
    """Another preset, once what came before it is answered; `settled` with None, or with what stands in the way."""

    preset: str
    settled: Future[None] = field(default_factory=Future)
