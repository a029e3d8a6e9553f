"""Reasoning before an answer that has a grammar."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import LogitsProcessor

if TYPE_CHECKING:
    from runtime.session.generation.grammar import GrammarRule


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The tokens with which a model begins and ends its reasoning; `begin` is None where the prompt
    has begun it."""

    begin: int | None
    end: int


class ThoughtsRule(LogitsProcessor):
    """Leaves reasoning free, but for the tokens `ends` that would end the answer there, and holds
    what follows it to a grammar. A model that does not begin to reason is held to it at once."""

    def __init__(self, rule: "GrammarRule", thoughts: Thoughts, ends: Sequence[int]) -> None:
        self._rule = rule
        self._thoughts = thoughts
        self._ends = ends
        self._may_begin = thoughts.begin is not None
        self._thinks = not self._may_begin

    @property
    def is_complete(self) -> bool:
        """True if nothing may follow but the end."""
        return self._rule.is_complete

    def allows(self, token: int) -> bool:
        """Return whether a token may be the next one."""
        if self._thinks:
            return token not in self._ends
        return (self._may_begin and token == self._thoughts.begin) or self._rule.allows(token)

    def few(self, num_tokens: int) -> torch.Tensor | None:
        """Return the tokens that may be the next one, as `GrammarRule.few`; None in reasoning."""
        return None if self._thinks or self._may_begin else self._rule.few(num_tokens)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Bar tokens in the scores [1, V] float32, in place."""
        if self._thinks:
            scores[:, [end for end in self._ends if end < scores.shape[1]]] = -float("inf")
        elif self._may_begin:
            begun = scores[0, self._thoughts.begin].clone()
            self._rule(input_ids, scores)[0, self._thoughts.begin] = begun
        else:
            self._rule(input_ids, scores)
        return scores

    def note(self, token: int) -> None:
        """Go on by the token that was drawn. Raises as `GrammarRule.note`."""
        begins = self._may_begin and token == self._thoughts.begin
        if not (self._thinks or begins):
            self._rule.note(token)
        self._thinks = begins or (self._thinks and token != self._thoughts.end)
        self._may_begin = False
