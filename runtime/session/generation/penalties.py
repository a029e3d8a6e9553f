"""Logits that a request changes by token: OpenAI's presence and frequency penalties, and biases."""

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor


class Penalties(LogitsProcessor):
    """Adds biases to logits, and takes penalties from those of tokens that were generated: the
    prompt's do not count, unlike for `repetition_penalty`."""

    def __init__(
        self,
        biases: Sequence[tuple[int, float]],
        *,
        presence: float,
        frequency: float,
        num_prompt_tokens: int,
    ) -> None:
        self._biases = biases
        self._presence = presence
        self._frequency = frequency
        self._num_seen = num_prompt_tokens
        self._present: set[int] = set()
        self._added: torch.Tensor | None = None  # to the logits [1, V]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Change the scores [1, V] in place, by the tokens so far [1, S]."""
        if self._added is None:
            self._added = torch.zeros_like(scores)
            for token, bias in self._biases:
                self._added[0, token] = bias
        if self._presence or self._frequency:
            for token in input_ids[0, self._num_seen :].tolist():
                first = token not in self._present
                self._added[0, token] -= self._frequency + self._presence * first
                self._present.add(token)
            self._num_seen = input_ids.shape[1]
        return scores.add_(self._added)
