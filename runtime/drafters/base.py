"""The contract of drafters, and their name table. Imports no torch.

A drafter proposes token ids without probabilities. A verification pass reads them behind the last
token, and the request draws at each place as it does undrafted, until a draw differs: for proposals
of one token this is speculative sampling (Leviathan et al., 2023,
https://arxiv.org/abs/2211.17192, Algorithm 1 with a q of one point), and it gives the tokens that
the same seed gives undrafted.

Other packages add drafters by an entry point of the group `moectl.drafters`, or by
`register_drafter`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Protocol

from artifacts.common.outside import installed, load
from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage

NONE = "none"
AUTO = "auto"
MOST = 8  # drafts of a pass
_GROUP = "moectl.drafters"


class DraftPasses(Protocol):
    """Passes of the session's own model over a request's cache, which load no expert, are not
    counted and which no policy sees."""

    def read(self, ids: Sequence[int]) -> Any:
        """Read tokens behind those read so far. Returns their logits [1, S, V], a tensor."""

    def rollback(self) -> None:
        """Forget every token that was read here; that is done after each `propose`."""


class Drafter(Protocol):
    """A drafter of one request."""

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return at most `most` drafts to follow all tokens so far, of prompt and answer; maybe
        none."""

    def note(self, tokens: Sequence[int], output: Any) -> None:
        """Note a pass, also the one over the prompt: the tokens [S] that it read and that stay,
        and its `output`, whose `hidden_states[-1]` [1, S', H] begins with theirs where the kind
        `wants_hidden`."""

    def close(self) -> None:
        """Free everything that is kept for the request."""


class DrafterKind(Protocol):
    """A drafter of a session, prepared once: `open(opened, argument)` makes it, with the text after
    `=` in its name, or None. Raises BadUsage for a model that it cannot draft for."""

    name: ClassVar[str]
    wants_hidden: ClassVar[bool]

    @classmethod
    def open(cls, opened: Any, argument: str | None) -> "DrafterKind": ...

    def begin(self, prompt: Sequence[int], passes: DraftPasses) -> Drafter:
        """Return the drafter of a request with this prompt."""

    def receipt(self) -> dict[str, object]:
        """Return what is in force, by name."""


@dataclass(frozen=True, slots=True)
class DraftPart:
    """Part of one request in a pass: its drafter's name, the drafts that were read for it and those
    that were right, the tokens that it got, and the seconds in which it was drafted."""

    name: str
    num_drafted: int
    num_right: int
    num_tokens: int
    draft_s: float = 0.0


class Lengths(Protocol):
    """Chooses how many tokens are drafted for each request of the next pass of a session, and for
    drafters that choose among others the one that was `chosen` last."""

    chosen: str

    def share(self, num_requests: int) -> None:
        """Choose for passes that so many requests share, from here on."""

    def next(self) -> int:
        """Return the most drafts of a request in the next pass, 0 for an undrafted one."""

    def note_pass(self, parts: Sequence[DraftPart], *, pass_s: float) -> None:
        """Note a pass of so many seconds in which all requests were decoding, by the part of each;
        the seconds in which tokens were drafted come on top."""

    def receipt(self) -> dict[str, object]:
        """Return the lengths over time."""


class FixedLength:
    """Drafts `k` tokens for each request of a pass."""

    def __init__(self, k: int, name: str) -> None:
        self._k = k
        self.chosen = name

    def share(self, num_requests: int) -> None:
        """Do nothing: the length stays."""

    def next(self) -> int:
        return self._k

    def note_pass(self, parts: Sequence[DraftPart], *, pass_s: float) -> None:
        """Do nothing: the length stays."""

    def receipt(self) -> dict[str, object]:
        return {"k": self._k}


_BUILT_IN = {
    AUTO: "runtime.drafters.auto:Auto",
    "ngram": "runtime.drafters.ngram:Ngram",
    "model": "runtime.drafters.model:SmallModel",
    "mtp": "runtime.drafters.mtp:Mtp",
    "resident": "runtime.drafters.resident:Resident",
}
_registered: dict[str, type[DrafterKind]] = {}


@dataclass(frozen=True, slots=True)
class Draft:
    """A choice of `--draft`: the drafter's name with its argument, and the tokens that it drafts
    for a pass; None: as many as pay."""

    name: str
    argument: str | None = None
    k: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Draft":
        """Return the choice in a text `none`, `auto` or `NAME[=ARGUMENT][:k]`. Raises BadUsage."""
        head, colon, last = text.rpartition(":")
        k = int(last) if colon and last.isdecimal() else None
        name, _, argument = (head if k is not None else text).partition("=")
        if name not in known():
            raise BadUsage(unknown("drafter", name, known()))
        if k is not None and (name in (NONE, AUTO) or not 1 <= k <= MOST):
            raise BadUsage(f"--draft {text}: give NAME:k with 1 <= k <= {MOST}, or leave out :k")
        return cls(name, argument or None, k)


def known() -> tuple[str, ...]:
    """Return the names of all drafters, `none` and `auto` among them."""
    return (NONE, AUTO, *dict.fromkeys((*_BUILT_IN, *_registered, *installed(_GROUP))))


def register_drafter(name: str) -> Callable[[type[DrafterKind]], type[DrafterKind]]:
    """Add a drafter, under a name that is free, as a decorator of its class."""

    def add(kind: type[DrafterKind]) -> type[DrafterKind]:
        if name in known():
            raise BadUsage(f"there is a drafter {name} already")
        _registered[name] = kind
        return kind

    return add


def kind_of(name: str) -> type[DrafterKind]:
    """Return the class of a drafter that is known. Raises Incompatible where another package's
    cannot be imported."""
    if name in _BUILT_IN:
        module, _, own = _BUILT_IN[name].partition(":")
        return getattr(import_module(module), own)
    if name not in _registered:
        load("drafter", installed(_GROUP)[name], lambda kind: _registered.update({name: kind}))
    return _registered[name]
