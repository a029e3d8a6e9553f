"""Results on stdout: tables, JSON, and heatmaps of characters, these also as pictures."""

import json
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moectl.charts.pictures import write_picture
from moectl.charts.plots import heatmap
from moectl.show.sizes import human_bytes

_SHADES = " ░▒▓█"
_HALF_BLOCK = "▀"
# Colours from dark to bright, evenly spaced; values between two of them get a mixed colour.
_SCALE = np.array(
    [(0, 0, 4), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164)], dtype=float
)
# columns: output to a pipe or a file is not cut or wrapped unless its reader says how wide
_UNLIMITED = 100_000
_FOLDED = 32  # characters: longer texts are wrapped
_FRAME = 3  # characters beside each column
_PICTURE = 640  # pixels that a picture is wide

Group = list[tuple[int, str]]  # columns by index, each with its heading


class NumBytes(int):
    """A number of bytes: shown in binary units in a table, as an integer in JSON."""


def fewer(shortfall: str) -> str:
    """Return the end of a note for a text shorter than was asked for; `shortfall` says that in
    words."""
    return f"; only {shortfall}" if shortfall else ""


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table: names of columns, and rows of numbers and texts. None is shown as a dash; the note
    is printed below. Columns that are `unshown` stand in JSON alone."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple]
    note: str = ""
    unshown: tuple[str, ...] = ()

    def records(self) -> list[dict[str, object]]:
        """The rows as dictionaries, for JSON: `fast GB/s` becomes `fast_gb_s`."""
        names = [re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") for name in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]

    def shown(self) -> "Sheet":
        """The sheet with the columns that are shown."""
        kept = [index for index, name in enumerate(self.columns) if name not in self.unshown]
        rows = [tuple(row[index] for index in kept) for row in self.rows]
        return Sheet(self.title, tuple(self.columns[index] for index in kept), rows, self.note)


@dataclass(frozen=True, slots=True)
class Heatmap:
    """A matrix [rows, columns] of non-negative numbers, shown on a scale from 0 to its largest
    value."""

    title: str
    values: np.ndarray
    row_name: str
    column_name: str


def console() -> Console:
    """A console on the present stdout, unlimited in width unless stdout is a terminal or COLUMNS is
    set."""
    shown = Console(highlight=False)
    return (
        shown
        if shown.is_terminal or "COLUMNS" in os.environ
        else Console(highlight=False, width=_UNLIMITED)
    )


def show_json(value: object) -> None:
    """Print exactly one JSON object; where stdout cannot hold its text, in escaped form."""
    text = json.dumps(value, ensure_ascii=False, default=_plain)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, default=_plain)
    print(text)


def show_sheet(sheet: Sheet) -> None:
    """Print a table with numbers aligned to the right. A table wider than the terminal is printed
    in several parts."""
    out = console()
    sheet = sheet.shown()
    cells = [[cell_text(value) for value in row] for row in sheet.rows]
    for number, group in enumerate(groups(sheet.columns, cells, room=out.width)):
        table = Table(
            title=None if number else sheet.title or None, title_justify="left", title_style="bold"
        )
        for index, heading in group:
            is_text = any(isinstance(row[index], str) for row in sheet.rows)
            table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
        for row in cells:
            table.add_row(*(Text(row[index]) for index, _ in group))
        out.print(table)
    if sheet.note:
        out.print(sheet.note, markup=False)


def groups(names: Sequence[str], cells: Sequence[Sequence[str]], *, room: int) -> list[Group]:
    """Split the columns of a table into groups that fit into `room` characters, so that no word or
    number is broken.

    Every group begins with the columns that identify a row.
    """
    longest = [max((len(row[index]) for row in cells), default=0) for index in range(len(names))]
    if _total(map(max, longest, map(len, names))) <= room:
        return [list(enumerate(names))]
    needs = [
        max([1, min(long, _FOLDED), *map(len, name.split())])
        for name, long in zip(names, longest, strict=True)
    ]
    columns = [(index, textwrap.fill(name, needs[index])) for index, name in enumerate(names)]
    if _total(needs) <= room:
        return [columns]
    key = _key(cells)
    begin = [column for column in columns if column[0] in key]
    parts: list[Group] = []
    for column in columns:
        if column[0] in key:
            continue
        if not parts or _total(needs[index] for index, _ in [*parts[-1], column]) > room:
            parts.append([*begin, column])
        else:
            parts[-1].append(column)
    return parts or [columns]


def _total(widths: Sequence[int]) -> int:
    return sum(width + _FRAME for width in widths) + 1


def _key(cells: Sequence[Sequence[str]]) -> set[int]:
    """The first columns, at least one, that distinguish as many rows as all columns do."""
    key = [0]
    num_distinct = len({row[0] for row in cells})
    for index in range(1, len(cells[0]) if cells else 0):
        if num_distinct == len(cells):
            break
        longer = len({tuple(row[column] for column in [*key, index]) for row in cells})
        if longer > num_distinct:
            key = [*key, index]
            num_distinct = longer
    return set(key)


def draw_heatmap(matrix: Heatmap, path: Path) -> None:
    """Draw the matrix in shades from 0 to its largest value. Where a few values would leave all
    others pale, the shades end at the 90th percentile."""
    values = matrix.values.astype(float)
    usual = float(np.percentile(values, 90))
    largest = float(values.max())
    is_cut = 0 < usual * 10 < largest
    top = usual if is_cut else largest
    says = f"{matrix.title}: rows are {matrix.row_name}, columns are {matrix.column_name}"
    names = {"row": matrix.row_name, "column": matrix.column_name}
    names["most"] = cell_text(top) + " or more" * is_cut
    drawing = heatmap(matrix.title, values.tolist(), top=top, says=says, width=_PICTURE, **names)
    write_picture(drawing, path)


def show_heatmap(heatmap: Heatmap) -> None:
    """Print a heatmap: in colour with two rows to a line on a terminal, else in grey with one row
    to a line."""
    out = console()
    is_coloured = out.is_terminal and out.color_system is not None
    room = out.width - _label_width(heatmap) if out.is_terminal else _UNLIMITED
    values, per_character = _narrowed(heatmap.values.astype(float), max(room, 1))
    out.print(heatmap.title, style="bold", markup=False)
    for line in (_coloured if is_coloured else _shaded)(values, _label_width(heatmap)):
        out.print(line, no_wrap=True)
    grain = f", {per_character} to a character (their mean)" if per_character > 1 else ""
    legend = (
        f"rows: {heatmap.row_name}; columns: {heatmap.column_name} 0 to "
        f"{heatmap.values.shape[1] - 1}{grain}; "
    )
    out.print(
        f"{legend}darkest 0, brightest {cell_text(float(values.max(initial=0)))}", markup=False
    )


def cell_text(value: object) -> str:
    """The text of a value in a table."""
    if value is None:
        return "-"
    if isinstance(value, NumBytes):
        return human_bytes(value)
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    if isinstance(value, float | np.floating):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _plain(value: object) -> object:
    """A value that json can write, for one that it cannot."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    return str(value)


def _label_width(heatmap: Heatmap) -> int:
    return len(str(len(heatmap.values) - 1)) + 1


def _narrowed(values: np.ndarray, width: int) -> tuple[np.ndarray, int]:
    """The matrix with neighbouring columns averaged until it fits into `width`, and how many were
    averaged into one."""
    per_character = -(-values.shape[1] // width)
    starts = np.arange(0, values.shape[1], per_character)
    sizes = np.diff([*starts, values.shape[1]])
    return np.add.reduceat(values, starts, axis=1) / sizes, per_character


def _shaded(values: np.ndarray, label_width: int) -> list[Text]:
    levels = np.ceil(_shares(values) * (len(_SHADES) - 1)).astype(int)
    return [
        Text(f"{row:>{label_width - 1}} " + "".join(_SHADES[level] for level in line))
        for row, line in enumerate(levels.tolist())
    ]


def _coloured(values: np.ndarray, label_width: int) -> list[Text]:
    colours = _colours(_shares(values))
    lines = []
    for row in range(0, len(values), 2):
        line = Text(f"{row:>{label_width - 1}} ")
        lower = colours[row + 1] if row + 1 < len(values) else [""] * values.shape[1]
        for above, below in zip(colours[row], lower, strict=True):
            line.append(_HALF_BLOCK, style=f"{above} on {below}" if below else above)
        lines.append(line)
    return lines


def _shares(values: np.ndarray) -> np.ndarray:
    highest = values.max(initial=0)
    return values / highest if highest > 0 else np.zeros_like(values)


def _colours(shares: np.ndarray) -> list[list[str]]:
    stops = np.linspace(0, 1, len(_SCALE))
    red, green, blue = (np.interp(shares, stops, channel).astype(int) for channel in _SCALE.T)
    return [
        [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in zip(*rows, strict=True)]
        for rows in zip(red, green, blue, strict=True)
    ]
