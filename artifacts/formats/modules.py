"""Patterns by which a config names modules: whole names, parts of names, globs, and regular expressions after `re:`."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache

from artifacts.errors import BadInput

REGEX, CLASS = "re:", "Linear"


def is_among(module: str, patterns: Iterable[str]) -> bool:
    """Whether a list of modules to leave alone has this module, or one that holds it."""
    dotted = f".{module}."
    return any(_matches(pattern, module) or f".{pattern}." in dotted for pattern in patterns)


def strength(pattern: str, module: str) -> int:
    """How exactly a target means a module: 3 by its name, 2 by a pattern, 1 by its class, 0 not at all. A name without
    a dot is taken for that of a class (compressed-tensors, `match_targets`)."""
    if pattern == module:
        return 3
    return 2 if _matches(pattern, module) else int("." not in pattern and not pattern.startswith(REGEX))


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith(REGEX):
        return _compiled(pattern.removeprefix(REGEX)).match(module) is not None
    return "*" in pattern and (fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*"))


@cache
def _compiled(pattern: str) -> re.Pattern:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadInput(f"{pattern[:40]!r} in the quantisation of config.json is no regular expression") from error
