"""Cumulative counters of a server over all its sessions."""

import threading
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from runtime.control.counters import Counter, by_layer, totals
from runtime.control.plan import Plan
from runtime.session.interleave import PassResult

OUTCOMES = ("answered", "left", "failed", "refused")  # left: the client went away


@dataclass(slots=True)
class Tally:
    """Counters that the scheduler's thread writes and other threads read, under `lock`."""

    num_layers: int
    table: np.ndarray = field(init=False)  # [F, L]
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_passes: int = 0
    busy_s: float = 0.0
    exposed_s: float = 0.0
    num_first: int = 0
    last_token: tuple[Plan | torch.Tensor, ...] = ()  # by layer, as a pass gives it
    first_s: float = 0.0  # from a request's arrival to its first token
    began_s: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.table = np.zeros((len(Counter), self.num_layers), np.int64)

    def turn(self, turn: PassResult) -> None:
        """Count a pass."""
        with self.lock:
            self.table += turn.counters
            self.num_passes += 1
            self.num_tokens += turn.token is not None
            self.busy_s += turn.seconds
            self.exposed_s += turn.exposed_s
            self.last_token = turn.last_token

    def first(self, num_prompt_tokens: int, seconds: float) -> None:
        """Count the first token of a request."""
        with self.lock:
            self.num_prompt_tokens += num_prompt_tokens
            self.num_first += 1
            self.first_s += seconds

    def end(self, outcome: str) -> None:
        """Count a request that has ended."""
        with self.lock:
            self.requests[outcome] += 1

    def read(self) -> dict[str, object]:
        """All counters at one moment."""
        with self.lock:
            layers = by_layer(self.table)
            return {
                "requests": dict(self.requests),
                "prompt_tokens": self.num_prompt_tokens,
                "generated_tokens": self.num_tokens,
                "passes": self.num_passes,
                "busy_seconds": self.busy_s,
                "exposed_stall_seconds": self.exposed_s,
                "first_tokens": self.num_first,
                "to_first_token_seconds": self.first_s,
                "uptime_seconds": time.monotonic() - self.began_s,
                "counters": totals(layers),
                "by_layer": layers,
            }
