"""The answer to an unknown name."""

import difflib
from collections.abc import Iterable


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return one line that says that this `kind` is unknown, with the nearest known name, or with
    all known names where none is near."""
    known = list(known)
    if guess := nearest(name, known):
        return f"unknown {kind} {name!r}; did you mean {guess}?"
    return f"unknown {kind} {name!r}. Known: {', '.join(known) or 'none'}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that may have been meant; None where none is near."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)
