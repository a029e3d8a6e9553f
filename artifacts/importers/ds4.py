"""The text that a fork of ds4 writes where DS4_EXPERT_TRACE names a file: below the line `# ds4
expert trace v1` the layer and the experts of a token, `LAYER ID ID ...` (FrankBarretta/ds4,
ds4_expert_trace.c at bae71f57)."""

from collections.abc import Iterator
from pathlib import Path

from artifacts.errors import BadInput
from artifacts.importers.calls import log_of_lines
from artifacts.importers.routing_log import LogOptions, RoutingLog
from artifacts.importers.text_lines import lines_of

_FIRST = "# ds4 expert trace v1"
_EXPECTED = f"the line {_FIRST!r}, then LAYER ID ID ..., as 3 52 40 85"


def read(path: Path, options: LogOptions) -> RoutingLog:
    """Return the log in a file. Raises BadInput."""
    return log_of_lines(path, _rows(path), options, expected=_EXPECTED)


def _rows(path: Path) -> Iterator[tuple[int, int, list[int]]]:
    is_first = True
    for number, line in lines_of(path):
        words = line.split()
        is_named = line == _FIRST if is_first else all(map(_is_number, words)) and len(words) > 1
        if not is_named:
            raise BadInput(f"{path}, line {number} is {line[:60]!r}; expected: {_EXPECTED}")
        if not is_first:
            yield number, int(words[0]), list(map(int, words[1:]))
        is_first = False


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) < 10
