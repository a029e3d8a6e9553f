"""Cumulative counters of a server over all its sessions."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from prometheus_client import Histogram

from runtime.control.counters import Counter, by_layer, totals
from runtime.control.plan import Plan
from runtime.session.generation.batch import RowResult
from runtime.session.generation.charges import Charge

OUTCOMES = ("answered", "left", "failed", "refused")  # left: the client went away
# what has a name of its own, and what all further ones are counted under
MOST_OWNERS = 50
OTHERS = "others"
# seconds, as other servers of language models have them
_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_WHOLE_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
_EACH_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
_OF_OWNER = (
    Counter.REQUESTS,
    Counter.HITS,
    Counter.FETCHED,
    Counter.DEMAND_BYTES,
    Counter.PREFETCH_BYTES,
)


@dataclass(slots=True)
class OwnerCounts:
    """Tokens given to the requests of one owner, first tokens counted apart, and the charge for
    them."""

    num_first: int = 0
    num_tokens: int = 0
    charge: Charge = field(default_factory=Charge)

    def read(self) -> dict[str, object]:
        sums = self.charge.counters.sum(axis=1)
        return {
            "first_tokens": self.num_first,
            "generated_tokens": self.num_tokens,
            "passes": self.charge.passes,
            "busy_seconds": self.charge.seconds,
            "exposed_stall_seconds": self.charge.exposed_s,
            "counters": {counter.name.lower(): float(sums[counter]) for counter in _OF_OWNER},
        }


def _histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Callable[[], Histogram]:
    """Return what makes a histogram outside the registry of the process, in which those of two
    servers would collide."""
    return lambda: Histogram(f"moectl_{name}", help_text, buckets=buckets, registry=None)


@dataclass(slots=True)
class Tally:
    """Counters that the scheduler's thread writes and other threads read, under `lock`. `owners`
    has the counters of each owner; their sums are those of the server."""

    num_layers: int
    owners: dict[str, OwnerCounts] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    num_prompt_tokens: int = 0
    num_cached: int = 0  # of them
    num_passes: int = 0
    num_first: int = 0
    last_token: tuple[Plan | torch.Tensor, ...] = ()  # by layer, as a pass gives it
    first_s: float = 0.0  # from a request's arrival to its first token
    to_first_token: Histogram = field(
        default_factory=_histogram(
            "time_to_first_token_seconds",
            "Time from the arrival of a request to its first token.",
            _FIRST_S,
        )
    )
    per_token: Histogram = field(
        default_factory=_histogram(
            "time_per_output_token_seconds",
            "Time from one token of an answer to the next.",
            _EACH_S,
        )
    )
    waited: Histogram = field(
        default_factory=_histogram(
            "request_queue_seconds",
            "Time from the arrival of a request to its first pass.",
            _FIRST_S,
        )
    )
    took: Histogram = field(
        default_factory=_histogram(
            "request_duration_seconds",
            "Time from the arrival of a request that was answered to its last token.",
            _WHOLE_S,
        )
    )
    began_s: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(
        self, results: Sequence[RowResult], last_token: tuple[Plan | torch.Tensor, ...]
    ) -> None:
        """Count a pass by what it gave the requests of each owner."""
        with self.lock:
            self.num_passes += 1
            self.last_token = last_token
            for result in results:
                owner = self._owner(result.owner)
                owner.num_tokens += result.token_id is not None
                owner.charge += result.charge

    def first(
        self, owner: str, num_prompt_tokens: int, seconds: float, *, num_cached: int = 0
    ) -> None:
        """Count the first token of a request."""
        with self.lock:
            self._owner(owner).num_first += 1
            self.num_prompt_tokens += num_prompt_tokens
            self.num_cached += num_cached
            self.num_first += 1
            self.first_s += seconds
            self.to_first_token.observe(seconds)

    def _owner(self, name: str) -> OwnerCounts:
        name = name if name in self.owners or len(self.owners) < MOST_OWNERS else OTHERS
        return self.owners.setdefault(name, OwnerCounts())

    def end(self, outcome: str) -> None:
        """Count a request that has ended."""
        with self.lock:
            self.requests[outcome] += 1

    def read(self) -> dict[str, object]:
        """All counters at one moment."""
        with self.lock:
            nothing = Charge(np.zeros((len(Counter), self.num_layers)))
            charge = sum((owner.charge for owner in self.owners.values()), nothing)
            layers = by_layer(np.rint(charge.counters).astype(np.int64))  # whole again
            return {
                "requests": dict(self.requests),
                "prompt_tokens": self.num_prompt_tokens,
                "cached_tokens": self.num_cached,
                "generated_tokens": sum(owner.num_tokens for owner in self.owners.values()),
                "passes": self.num_passes,
                "busy_seconds": charge.seconds,
                "exposed_stall_seconds": charge.exposed_s,
                "first_tokens": self.num_first,
                "to_first_token_seconds": self.first_s,
                "uptime_seconds": time.monotonic() - self.began_s,
                "counters": totals(layers),
                "by_layer": layers,
                "owners": {name: owner.read() for name, owner in self.owners.items()},
            }
