"""Drafts by whichever of the drafters that need nothing further does best, or by none."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from artifacts.errors import BadUsage, Incompatible
from runtime.drafters.base import AUTO, Drafter, DrafterKind, DraftPasses, kind_of
from runtime.drafters.length import MeasuredLengths
from runtime.model.open import MoeModel

# by name the seconds of a draft that are expected, as a share of those of a plain pass
_NAMES = {"ngram": 0.0, "mtp": 0.1, "resident": 0.2}


class Auto:
    """The drafters that this model can have, and `lengths`, which chooses among them."""

    name: ClassVar[str] = AUTO
    reads_model: ClassVar[bool] = True  # as `resident` does

    def __init__(self, kinds: Mapping[str, DrafterKind]) -> None:
        self._kinds = kinds
        self.wants_hidden = any(kind.wants_hidden for kind in kinds.values())
        self.lengths = MeasuredLengths(list(kinds), draft={name: _NAMES[name] for name in kinds})

    @classmethod
    def open(cls, opened: MoeModel, argument: str | None) -> "Auto":
        """Open each drafter but those that refuse this model. Raises BadUsage for an argument."""
        if argument is not None:
            raise BadUsage(f"--draft auto={argument}: leave out ={argument}, or name a drafter")
        kinds = {}
        for name in _NAMES:
            try:
                kinds[name] = kind_of(name).open(opened, None)
            except (BadUsage, Incompatible):  # as mtp where the checkpoint has no such layers
                continue
        return cls(kinds)

    def begin(self, prompt: Sequence[int], passes: DraftPasses) -> "AutoDrafter":
        """Return the drafter of a request."""
        begun = {name: kind.begin(prompt, passes) for name, kind in self._kinds.items()}
        return AutoDrafter(begun, self.lengths)

    def receipt(self) -> dict[str, object]:
        """Return what each drafter says, by its name."""
        return {name: kind.receipt() for name, kind in self._kinds.items()}


class AutoDrafter:
    """The drafters of one request."""

    def __init__(self, drafters: Mapping[str, Drafter], lengths: MeasuredLengths) -> None:
        self._drafters = drafters
        self._lengths = lengths

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return the drafts of the best drafter that has any."""
        for name, length in self._lengths.plan(most):
            drafts = self._drafters[name].propose(tokens, length)
            if drafts:
                self._lengths.chosen = name
                return drafts
        return []

    def note(self, tokens: Sequence[int], output: Any) -> None:
        """Note a pass with every drafter."""
        for drafter in self._drafters.values():
            drafter.note(tokens, output)

    def close(self) -> None:
        """Free everything that is kept for the request."""
        for drafter in self._drafters.values():
            drafter.close()
