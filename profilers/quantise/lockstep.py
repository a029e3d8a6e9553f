"""Takes all batches of a text through a model layer by layer, exactly and in bounded memory, whatever the family.

Every batch is a forward pass on a thread of its own that stops where a layer's experts are called; only one ever runs.
When all are there, the caller has all inputs of that layer, computes its experts in any way it likes, and lets the
passes go on. What is kept of a pass is what its own code holds there: its hidden states, and nothing of other layers.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType

import numpy as np
import torch

from profilers.text.batches import check_sequences, padded, real_rows
from runtime.engine.engine import NAME
from runtime.model.layers import MoeLayer
from runtime.model.open import MoeModel


@dataclass(frozen=True, slots=True)
class LayerBatch:
    """One batch at the experts of one layer: T rows, of which `selected` is -1 where they are padding."""

    hidden: torch.Tensor  # [T, H]
    selected: np.ndarray  # [T, K] int64
    weights: torch.Tensor  # [T, K] as the model applies them


def batches(sequences: Sequence[np.ndarray], *, num_tokens: int) -> list[tuple[np.ndarray, ...]]:
    """The sequences, longest first, in batches of at most `num_tokens` rows with their padding (one sequence at least).

    Equal lengths keep their order, so that the batches follow from the sequences alone.
    """
    ordered = sorted(sequences, key=len, reverse=True)
    found, start = [], 0
    while start < len(ordered):
        count = max(1, num_tokens // len(ordered[start]))
        found.append(tuple(ordered[start : start + count]))
        start += count
    return found


class Lockstep:
    """A context manager in which `layers` yields every layer's batches, after which their outputs are to be `put`.

    The last layer needs none. Compute is single-threaded, so that a number of threads changes no bit.
    """

    def __init__(self, opened: MoeModel, parts: Sequence[tuple[np.ndarray, ...]]) -> None:
        check_sequences(opened.model, [sequence for part in parts for sequence in part])
        self._opened = opened
        self._passes = [_Pass(opened, part) for part in parts]
        self._outputs: Sequence[torch.Tensor] | None = None

    def __enter__(self) -> "Lockstep":
        self._opened.model.set_experts_implementation(NAME)
        for layer in self._opened.layers:
            layer.experts.moectl_forward = _arrive
        for each in self._passes:
            each.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for each in self._passes:
            each.stop()
        for layer in self._opened.layers:
            del layer.experts.moectl_forward
        self._opened.model.set_experts_implementation("eager")

    def layers(self) -> Iterator[tuple[MoeLayer, list[LayerBatch]]]:
        """Each layer in order of depth with its batches, in the order of `parts`."""
        for layer in self._opened.layers:
            outputs = self._outputs if layer.index else [None] * len(self._passes)
            assert outputs is not None, f"layer {layer.index - 1} was given no outputs"
            self._outputs = None
            yield layer, [each.advance(output) for each, output in zip(self._passes, outputs, strict=True)]

    def put(self, outputs: Sequence[torch.Tensor]) -> None:
        """What the layer's experts make of each batch, [T, H]."""
        self._outputs = outputs


class _Stopped(BaseException):
    """Ends a pass that nobody wants the rest of."""


class _Pass(threading.Thread):
    """One forward pass. It and its caller take turns: exactly one of them runs."""

    def __init__(self, opened: MoeModel, sequences: tuple[np.ndarray, ...]) -> None:
        super().__init__(daemon=True)
        self._model = opened.model
        self._ids, self._mask = padded(sequences)
        self._is_real = real_rows(self._ids, self._mask)
        self._inbox: SimpleQueue = SimpleQueue()
        self._outbox: SimpleQueue = SimpleQueue()

    def advance(self, output: torch.Tensor | None) -> LayerBatch:
        """Go on with the output of the last layer to the next one. Raises what the model raises."""
        self._inbox.put(output)
        answer = self._outbox.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def stop(self) -> None:
        """End the pass where it stands, and the thread."""
        self._inbox.put(_Stopped())
        self.join()

    def arrive(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Called by the experts of a layer, on this thread."""
        selected = np.where(self._is_real[:, None], ids.cpu().numpy(), -1)
        self._outbox.put(LayerBatch(hidden, selected, weights))
        return self._next()

    def run(self) -> None:
        torch.set_num_threads(1)  # a thread starts with torch's default, not with its maker's number
        try:
            self._next()
            device = self._model.device
            mask = None if self._mask is None else self._mask.to(device)
            with torch.inference_mode():
                self._model(input_ids=self._ids.to(device), attention_mask=mask, use_cache=False)
        except _Stopped:
            return
        except Exception as error:  # whatever it is, the caller raises it
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
