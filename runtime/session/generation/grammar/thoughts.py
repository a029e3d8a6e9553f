"""Reasoning before an answer that has a grammar."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The tokens with which a model begins and ends its reasoning; `begin` is None where the prompt
    has begun it."""

    begin: int | None
    end: int
