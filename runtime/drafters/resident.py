"""Drafts by the model itself with the experts that are there, so that nothing is loaded: an absent
expert is computed on its shadow replica if there is one, and left out otherwise."""

from collections.abc import Sequence
from typing import ClassVar

import torch

from artifacts.errors import BadUsage
from runtime.drafters.base import DraftPasses
from runtime.drafters.greedy import drafted
from runtime.model.open import MoeModel


class Resident:
    """Drafts while the model, reduced so, is sure enough of its choice."""

    name: ClassVar[str] = "resident"
    wants_hidden: ClassVar[bool] = False
    reads_model: ClassVar[bool] = True

    @classmethod
    def open(cls, opened: MoeModel, argument: str | None) -> "Resident":
        """Return the drafter, which takes no argument. Raises BadUsage."""
        if argument is not None:
            raise BadUsage(f"--draft resident={argument}: leave out ={argument}")
        return cls()

    def begin(self, prompt: Sequence[int], passes: DraftPasses) -> "ResidentDrafter":
        """Return the drafter of a request, over its own cache."""
        return ResidentDrafter(passes)

    def receipt(self) -> dict[str, object]:
        """Return nothing: there are no further weights."""
        return {}


class ResidentDrafter:
    """Reads the last token and its own drafts behind what the request has read."""

    def __init__(self, passes: DraftPasses) -> None:
        self._passes = passes

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` drafts behind all tokens so far."""
        return drafted(self._read(tokens[-1]), self._read, most) if most else []

    def _read(self, token: int) -> torch.Tensor:
        return self._passes.read([token])[0, -1]

    def note(self, tokens: Sequence[int], output: object) -> None:
        """Do nothing: what was accepted is in the request's own cache."""

    def close(self) -> None:
        """Do nothing: what was read was forgotten."""
