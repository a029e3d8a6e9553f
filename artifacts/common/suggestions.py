"""The answer to an unknown name."""

import difflib
from collections.abc import Iterable


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One line: no such `kind`, the nearest known name if there is one, and all known names."""
    known = list(known)
    guesses = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f"; did you mean {guesses[0]}?" if guesses else "."
    return f"unknown {kind} {name!r}{guess} Known: {', '.join(known) or 'none'}"
