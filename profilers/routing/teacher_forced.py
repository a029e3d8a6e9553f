"""Runs whole sequences through a session and says which iteration each token belongs to.

The text is teacher-forced: a causal model computes the same for a token whether its successors are
present or not. One pass over a sequence therefore observes its prompt and every later token as
decoding one by one would.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn

from artifacts.routing.coactivation import NotFiniteWeights
from profilers.text.batches import Batch, check_sequences, padded, real_rows
from runtime.policies.base import Step
from runtime.session.generation.finite import NotFinite
from runtime.session.session import Session

Hook = Callable[[nn.Module, tuple, object], None]


class Observer(Protocol):
    """Collects what a session computes for a batch."""

    def begin_batch(self, rows: np.ndarray) -> None:
        """Prepare for a batch; `rows` [B * S] bool are the rows of its flattened tensors that are
        tokens."""

    def begin_pass(self, requests: np.ndarray) -> None:
        """Prepare for the batch's pass; `requests` [T] is the request of each token."""

    def add(self, step: Step) -> None:
        """Take in one layer's step."""


def run_batches(
    session: Session,
    batches: Iterable[Batch],
    observer: Observer,
    hooks: Sequence[tuple[nn.Module, Hook]] = (),
) -> Iterator[Batch]:
    """Run batches through the session and yield each when its pass is done. The observer and the
    forward `hooks` are attached until the last one. Raises BadInput for sequences that the model
    cannot read, NotFinite for numbers that no router can choose by."""
    session.watcher.on_pass = observer.begin_pass
    session.watcher.on_step = observer.add
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    try:
        for batch in batches:
            check_sequences(session.opened.model, batch.sequences)
            ids, mask = padded(batch.sequences)
            observer.begin_batch(real_rows(ids, mask))
            session.new_requests(len(batch.sequences))
            try:
                session.forward(ids, mask=mask)
            except NotFiniteWeights:
                raise session.traced(NotFinite(ids, session.opened.dtype)) from None
            yield batch
    finally:
        for handle in handles:
            handle.remove()
        session.watcher.on_pass = session.watcher.on_step = None


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """The place of each of a pass's T tokens: its request, counted from the batch's first, its
    position in the request, and its iteration: 0 for the prompt, then one for each token."""

    request: np.ndarray  # [T] int
    position: np.ndarray  # [T] int
    iteration: np.ndarray  # [T] int
    ends_iteration: np.ndarray  # [T] bool

    @classmethod
    def of(cls, requests: np.ndarray, prefill: int) -> "TokenPlaces":
        """`requests` [T] rise by one from sequence to sequence; without a prompt (`prefill` 0)
        every token is an iteration."""
        request = requests - requests[0]
        position = np.arange(len(request)) - np.searchsorted(request, request)
        iteration = np.maximum(position - prefill + 1, 0) if prefill else position
        ends = np.diff(request, append=-1).astype(bool) | np.diff(iteration, append=-1).astype(bool)
        return cls(request, position, iteration, ends)


def token_rows(output: torch.Tensor, rows: np.ndarray) -> np.ndarray:
    """[T, H] float32 on the host: the rows of a module's output [B, S, H] that are tokens."""
    return output.flatten(0, -2).float().cpu().numpy()[rows]
