"""Several generations of one session at a time, which take turns pass by pass.

Each is transformers' own generate() on a thread of its own, and one thread runs at any moment. A
pass belongs to one request: its tokens are bit for bit the same as in a run by itself, and its
counters are the request's alone.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from runtime.session.finite import NotFinite
from runtime.session.generate import Sampling, Token, stream
from runtime.session.session import Session

_MANY_PASSES = 1000


@dataclass(frozen=True, slots=True)
class PassResult:
    """One pass of a generation: its token, if it gave one, and its effort."""

    token: Token | None
    counters: np.ndarray  # [F, L] by counter and layer
    exposed_s: float  # of `seconds`, how long compute waited for the link
    seconds: float


class Interleave:
    """Owns the session until `close`: no other pass may run. One thread calls it, and gives the
    turns."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._mine = threading.local()
        # Runs before the engine's own hook, which begins the pass.
        self._handle = session.opened.model.register_forward_pre_hook(
            self._before_pass, prepend=True
        )

    def close(self) -> None:
        """Give the session back; its generations must be over."""
        self._handle.remove()

    def begin(self, prompt: torch.Tensor, sampling: Sampling) -> "Generation":
        """Begin a new request with a prompt [1, S] int64. Nothing is computed before its first
        `step`."""
        self.session.new_requests(1)
        return Generation(self.session, self._mine, prompt, sampling)

    def _before_pass(self, model: torch.nn.Module, args: tuple) -> None:
        generation = getattr(self._mine, "generation", None)
        if generation is not None:
            generation.before_pass()


class Generation:
    """One request under way: call `step` until `is_over`, or `close` to end it earlier."""

    def __init__(
        self, session: Session, mine: threading.local, prompt: torch.Tensor, sampling: Sampling
    ) -> None:
        self.is_over = False
        self._session = session
        self._mine = mine
        self._request = session.watcher.first_request
        self._is_drawn = sampling.temperature > 0
        self._go = threading.Event()
        self._back = threading.Event()
        self._has_passed = self._is_left = False
        self._random_state = _random_state() if self._is_drawn else []
        model = session.opened.model
        tokenizer = session.opened.tokenizer
        self._tokens = stream(
            model, prompt.to(model.device), sampling, tokenizer=tokenizer, turn=self._take_turns
        )

    def step(self) -> PassResult:
        """Run one pass and draw its token; the turn ends where the next pass would begin. Raises
        the error that ended the generation."""
        session = self._session
        begin_s = time.perf_counter()
        if len(session.controller.counters.passes) > _MANY_PASSES:
            session.engine.fold()
        first_pass = len(session.controller.counters.passes)
        session.watcher.first_request = self._request
        self._go.set()
        try:
            token = next(self._tokens, None)
            self._back.wait()
            self._back.clear()
            if self.is_over:
                self._tokens.close()  # it refers to this object, as this one does to it
        except NotFinite as error:
            self.is_over = True
            raise session.traced(error) from None
        except BaseException:
            self.is_over = True
            raise
        return PassResult(
            token=token,
            counters=session.controller.counters.sum(first_pass=first_pass),
            exposed_s=sum(session.engine.stall_s[first_pass:]),
            seconds=time.perf_counter() - begin_s,
        )

    def close(self) -> None:
        """End the generation where its next pass would begin, and free its keys and values."""
        self._is_left = True
        self._go.set()
        self._tokens.close()
        self.is_over = True

    # On the generation's own thread

    @contextmanager
    def _take_turns(self, stop: threading.Event) -> Iterator[bool]:
        """Wait for the first turn; at the end of the generation give the last one back."""
        self._mine.generation = self
        self._take_turn()
        try:
            yield not self._is_left
        finally:
            self.is_over = True
            self._back.set()

    def before_pass(self) -> None:
        """End the turn if it has had its pass, and wait for the next one."""
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
        if self._is_drawn:  # other generations have drawn from the generator meanwhile
            _set_random_state(self._random_state)


class _Left(Exception):
    """Ends a generation that was closed."""


def _random_state() -> list[torch.Tensor]:
    return [
        torch.get_rng_state(),
        *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()),
    ]


def _set_random_state(state: list[torch.Tensor]) -> None:
    host, *devices = state
    torch.set_rng_state(host)
    if devices:
        torch.cuda.set_rng_state_all(devices)
