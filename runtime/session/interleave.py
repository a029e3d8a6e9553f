"""Several generations of one session at a time, which take turns pass by pass.

Each is transformers' own generate() on a thread of its own, of which one runs at any moment. A pass is one request's
and nobody else's: its tokens are those of a run by itself, to the bit, and so every counter has one owner.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from runtime.session.generate import Sampling, Token, stream
from runtime.session.session import Session

_MANY_PASSES = 1000


@dataclass(frozen=True, slots=True)
class Turn:
    """One pass of a generation: the token that it gave, if it gave one, and what it took: counters [F, L], seconds
    that compute waited for the link, and all seconds."""

    token: Token | None
    counters: np.ndarray
    exposed_s: float
    seconds: float


class Interleave:
    """Owns the session while it is open: nobody else may run a pass. Of one thread, which gives the turns."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._mine = threading.local()
        # Before the engine's own hook, for which the pass has begun then.
        self._handle = session.opened.model.register_forward_pre_hook(self._before_pass, prepend=True)

    def close(self) -> None:
        self._handle.remove()

    def begin(self, prompt: torch.Tensor, sampling: Sampling) -> "Generation":
        """Of a prompt [1, S], a request of its own. Nothing is computed yet."""
        self.session.new_requests(1)
        return Generation(self.session, self._mine, prompt, sampling)

    def _before_pass(self, model: torch.nn.Module, args: tuple) -> None:
        generation = getattr(self._mine, "generation", None)
        if generation is not None:
            generation.before_pass()


class Generation:
    """One request under way: `step` until it `is_over`; `close` ends it before."""

    def __init__(self, session: Session, mine: threading.local, prompt: torch.Tensor, sampling: Sampling) -> None:
        self.is_over = False
        self._session, self._mine, self._request = session, mine, session.watcher.first_request
        self._is_drawn = sampling.temperature > 0
        self._go, self._back = threading.Event(), threading.Event()
        self._has_passed = self._is_left = False
        self._random_state = _random_state() if self._is_drawn else []
        model = session.opened.model
        self._tokens = stream(model, prompt.to(model.device), sampling, turn=self._whole)

    def step(self) -> Turn:
        """Run one pass, its token drawn and all; the turn ends where the next pass would begin. Raises what ended the
        generation."""
        session, begin_s = self._session, time.perf_counter()
        if len(session.controller.counters.passes) > _MANY_PASSES:
            session.engine.fold()
        first_pass = len(session.controller.counters.passes)
        session.watcher.first_request = self._request
        self._go.set()
        try:
            token = next(self._tokens, None)
            self._back.wait()
            self._back.clear()
        except BaseException:
            self.is_over = True
            raise
        return Turn(
            token=token,
            counters=session.controller.counters.sum(first_pass=first_pass),
            exposed_s=sum(session.engine.stall_s[first_pass:]),
            seconds=time.perf_counter() - begin_s,
        )

    def close(self) -> None:
        """Leave, where the next pass would begin if there is one, and let go of its keys and values."""
        self._is_left = True
        self._go.set()
        self._tokens.close()
        self.is_over = True

    # On the generation's own thread

    @contextmanager
    def _whole(self, stop: threading.Event) -> Iterator[bool]:
        """From the first turn to the end."""
        self._mine.generation = self
        self._take_turn()
        try:
            yield not self._is_left
        finally:
            self.is_over = True
            self._back.set()

    def before_pass(self) -> None:
        """Here the turn ends that had its pass."""
        if self._has_passed:
            if self._is_drawn:
                self._random_state = _random_state()
            self._back.set()
            self._take_turn()
        if self._is_left:
            raise _Left
        self._has_passed = True

    def _take_turn(self) -> None:
        self._go.wait()
        self._go.clear()
        self._has_passed = False
        if self._is_drawn:  # what others drew meanwhile is none of its business
            _set_random_state(self._random_state)


class _Left(Exception):
    """Nobody waits for the generation any more."""


def _random_state() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def _set_random_state(state: list[torch.Tensor]) -> None:
    host, *devices = state
    torch.set_rng_state(host)
    if devices:
        torch.cuda.set_rng_state_all(devices)
