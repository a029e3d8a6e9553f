"""Lines of a text file, and the JSON and whole numbers in them."""

from collections.abc import Iterator
from pathlib import Path

from artifacts.common.untrusted import parse_json
from artifacts.errors import BadInput


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that are not blank, with their numbers from 1. Raises BadInput."""
    if not path.is_file():
        raise BadInput(f"there is no file {path}")
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from (
                (number, line.strip()) for number, line in enumerate(file, 1) if line.strip()
            )
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is no text: {error.reason} at byte {error.start}") from error


def json_lines(path: Path, expected: str) -> Iterator[tuple[str, object]]:
    """The value of each line with the place of the line. Raises BadInput, which says what is
    `expected`."""
    for number, line in lines_of(path):
        place = f"{path}, line {number}"
        try:
            yield place, parse_json(line)
        except ValueError as error:
            raise BadInput(f"{place} is no JSON ({error}); expected: {expected}") from error


def is_whole(value: object) -> bool:
    """Return whether a value from JSON is a whole number from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
