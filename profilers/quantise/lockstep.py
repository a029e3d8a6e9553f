"""Takes all batches of a text through a model layer by layer, exactly and in bounded memory, for
every model family.

Every batch is a forward pass on a thread of its own that stops where a layer's experts are called;
only a limited number run at a time. When all passes have stopped, the caller has the inputs of that
layer's experts, computes their outputs and lets the passes continue. A stopped pass holds only its
own hidden states, and nothing of other layers.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType

import numpy as np
import torch

from profilers.text.batches import check_sequences, padded, real_rows
from runtime.engine.engine import NAME
from runtime.model.layers import MoeLayer
from runtime.model.open import MoeModel
from runtime.model.rows.attention import reason_not_joined


@dataclass(frozen=True, slots=True)
class LayerBatch:
    """One batch at the experts of one layer: T rows; `selected` is -1 in rows of padding."""

    hidden: torch.Tensor  # [T, H]
    selected: np.ndarray  # [T, K] int64
    weights: torch.Tensor  # [T, K] as the model applies them


def batches(sequences: Sequence[np.ndarray], *, num_tokens: int) -> list[tuple[np.ndarray, ...]]:
    """Return the sequences, longest first, in batches of at most `num_tokens` rows with padding, at
    least one each.

    Sequences of equal length keep their order, so the batches depend on the sequences alone.
    """
    ordered = sorted(sequences, key=len, reverse=True)
    parts = []
    start = 0
    while start < len(ordered):
        count = max(1, num_tokens // len(ordered[start]))
        parts.append(tuple(ordered[start : start + count]))
        start += count
    return parts


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: rounding depends on the number of threads, and files may not depend on
    the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Lockstep:
    """A context manager in which `layers` yields every layer's batches; the caller then gives their
    outputs to `put`.

    The last layer needs no outputs. `at_once` passes run at a time, where the model's passes share
    nothing. Each computes on one thread, so results do not depend on the number of threads.
    """

    def __init__(
        self, opened: MoeModel, parts: Sequence[tuple[np.ndarray, ...]], *, at_once: int = 1
    ) -> None:
        check_sequences(opened.model, [sequence for part in parts for sequence in part])
        self._opened = opened
        self._at_once = 1 if reason_not_joined(opened.model) else at_once
        self._passes = [_Pass(opened, part) for part in parts]
        self._outputs: Sequence[torch.Tensor] | None = None

    def __enter__(self) -> "Lockstep":
        self._opened.model.set_experts_implementation(NAME)
        for layer in self._opened.layers:
            layer.experts.moectl_forward = _arrive
        for one_pass in self._passes:
            one_pass.start()
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for one_pass in self._passes:
            one_pass.stop()
        for layer in self._opened.layers:
            del layer.experts.moectl_forward
        self._opened.model.set_experts_implementation("eager")

    def layers(self) -> Iterator[tuple[MoeLayer, list[LayerBatch]]]:
        """Yield each layer in order of depth with its batches, in the order of `parts`."""
        for layer in self._opened.layers:
            outputs = self._outputs if layer.index else [None] * len(self._passes)
            assert outputs is not None, f"layer {layer.index - 1} was given no outputs"
            self._outputs = None
            yield layer, self._advanced(outputs)

    def _advanced(self, outputs: Sequence[torch.Tensor | None]) -> list[LayerBatch]:
        """Continue every pass, each with its output, up to the next layer. Raises any exception of
        the model."""
        arrived = []
        running = deque()
        for one_pass, output in zip(self._passes, outputs, strict=True):
            if len(running) == self._at_once:
                arrived.append(running.popleft().arrived())
            one_pass.go_on(output)
            running.append(one_pass)
        return arrived + [one_pass.arrived() for one_pass in running]

    def put(self, outputs: Sequence[torch.Tensor]) -> None:
        """Set the output of the layer's experts for each batch, [T, H]."""
        self._outputs = outputs


class _Stopped(BaseException):
    """Ends a pass whose remaining layers are not needed."""


class _Pass(threading.Thread):
    """One forward pass on a thread, which waits at every layer until it is to go on."""

    def __init__(self, opened: MoeModel, sequences: tuple[np.ndarray, ...]) -> None:
        super().__init__(daemon=True)
        self._model = opened.model
        self._ids, self._mask = padded(sequences)
        self._is_real = real_rows(self._ids, self._mask)
        self._inbox: SimpleQueue = SimpleQueue()
        self._outbox: SimpleQueue = SimpleQueue()

    def go_on(self, output: torch.Tensor | None) -> None:
        """Continue with the output of the last layer."""
        self._inbox.put(output)

    def arrived(self) -> LayerBatch:
        """Wait until the pass is at the next layer. Raises any exception of the model."""
        answer = self._outbox.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def stop(self) -> None:
        """End the pass at its current layer, and its thread."""
        self._inbox.put(_Stopped())
        self.join()

    def arrive(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Stop at the experts of a layer, on this thread, until their output [T, H] is given."""
        selected = np.where(self._is_real[:, None], ids.cpu().numpy(), -1)
        self._outbox.put(LayerBatch(hidden, selected, weights))
        return self._next()

    def run(self) -> None:
        # a thread starts with torch's default number, not with that of its parent
        torch.set_num_threads(1)
        try:
            self._next()
            device = self._model.device
            mask = None if self._mask is None else self._mask.to(device)
            with torch.inference_mode():
                self._model(input_ids=self._ids.to(device), attention_mask=mask, use_cache=False)
        except _Stopped:
            return
        except Exception as error:  # raised again in `arrived`
            self._outbox.put(error)

    def _next(self) -> torch.Tensor | None:
        message = self._inbox.get()
        if isinstance(message, _Stopped):
            raise message
        return message


def _arrive(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    current = threading.current_thread()
    assert isinstance(current, _Pass), "only passes in lockstep run while the model is in it"
    return current.arrive(hidden, ids, weights)
