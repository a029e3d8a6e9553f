"""Tables wider than the terminal, as several below each other, so that no word or number is broken."""

import textwrap
from collections.abc import Sequence

_FOLDED = 32  # characters: longer texts go over several lines
_FRAME = 3  # characters beside each column

Group = list[tuple[int, str]]  # columns by index, each with its heading


def groups(names: Sequence[str], cells: Sequence[Sequence[str]], *, room: int) -> list[Group]:
    """The columns as they fit into `room` characters: all in one, or in several that each begin with those that tell
    the rows apart."""
    longest = [max((len(row[index]) for row in cells), default=0) for index in range(len(names))]
    if _total(map(max, longest, map(len, names))) <= room:
        return [list(enumerate(names))]
    needs = [max([1, min(long, _FOLDED), *map(len, name.split())]) for name, long in zip(names, longest, strict=True)]
    columns = [(index, textwrap.fill(name, needs[index])) for index, name in enumerate(names)]
    if _total(needs) <= room:
        return [columns]
    key = _key(cells)
    begin = [column for column in columns if column[0] in key]
    found: list[Group] = []
    for column in columns:
        if column[0] in key:
            continue
        if not found or _total(needs[index] for index, _ in [*found[-1], column]) > room:
            found.append([*begin, column])
        else:
            found[-1].append(column)
    return found or [columns]


def _total(widths: Sequence[int]) -> int:
    return sum(width + _FRAME for width in widths) + 1


def _key(cells: Sequence[Sequence[str]]) -> set[int]:
    """The first columns that tell rows apart as well as all do; at least one."""
    key, told = [0], len({row[0] for row in cells})
    for index in range(1, len(cells[0]) if cells else 0):
        if told == len(cells):
            break
        now = len({tuple(row[one] for one in [*key, index]) for row in cells})
        if now > told:
            key, told = [*key, index], now
    return set(key)
