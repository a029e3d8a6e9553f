"""Patterns by which a config names modules: whole names, parts of names, globs, and regular
expressions after `re:`."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING

from artifacts.errors import BadInput

if TYPE_CHECKING:
    import regex

REGEX = "re:"
CLASS = "Linear"
_MATCH_S = 0.5  # how long a pattern may take for one name


def is_among(module: str, patterns: Iterable[str]) -> bool:
    """Return whether a list of modules to leave alone names this module, or one that contains
    it."""
    dotted = f".{module}."
    return any(_matches(pattern, module) or f".{pattern}." in dotted for pattern in patterns)


def strength(pattern: str, module: str) -> int:
    """Return how exactly a target means a module: 3 by its name, 2 by a pattern, 1 by its class, 0
    not at all. A name without a dot is taken for the name of a class (compressed-tensors,
    `match_targets`)."""
    if pattern == module:
        return 3
    return (
        2
        if _matches(pattern, module)
        else int("." not in pattern and not pattern.startswith(REGEX))
    )


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith(REGEX):
        return _is_match(pattern.removeprefix(REGEX), module)
    return "*" in pattern and (fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*"))


def _is_match(pattern: str, module: str) -> bool:
    try:
        return _compiled(pattern).match(module, timeout=_MATCH_S) is not None
    except TimeoutError as error:
        raise BadInput(
            f"{pattern[:40]!r} in the quantisation of config.json takes too long to match "
            f"{module[:80]}: simplify it"
        ) from error


@cache
def _compiled(pattern: str) -> "regex.Pattern":
    import regex  # few configs have such patterns

    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise BadInput(
            f"{pattern[:40]!r} in the quantisation of config.json is no regular expression"
        ) from error
