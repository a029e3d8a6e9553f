"""Log probabilities of tokens that were drawn, by the model alone."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probability of a token, and the most probable tokens in its place, best first. They are
    the model's, before temperature, penalties, biases or a grammar."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()  # token ids with their log probabilities

    @classmethod
    def of(cls, log_probabilities: torch.Tensor, token: int, num_top: int) -> "Logprobs":
        """Return those of a token by log probabilities [1, V]."""
        top = log_probabilities[0].topk(min(num_top, log_probabilities.shape[1]))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return cls(float(log_probabilities[0, token]), tuple(pairs))
