"""What to answer to a name that is not known."""

import difflib
from collections.abc import Iterable


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One line: no such `kind`, the nearest guess if there is one, and the known names."""
    known = list(known)
    guesses = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f"; did you mean {guesses[0]}?" if guesses else "."
    return f"unknown {kind} {name!r}{guess} Known: {', '.join(known) or 'none'}"
