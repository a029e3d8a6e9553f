"""Tables, heatmaps and numbers in text form."""

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from moectl.show import render
from moectl.show.render import (
    Heatmap,
    NumBytes,
    Sheet,
    human_bytes,
    show_heatmap,
    show_json,
    show_sheet,
)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**42, "4.0 TiB"),
    ],
)
def test_human_bytes(nbytes, text):
    assert human_bytes(nbytes) == text


def test_a_piped_table_is_not_cut(capsys):
    long = "a very long text " * 20
    show_sheet(
        Sheet(
            "Title",
            ("name", "count", "share"),
            [(long, 12345, 0.123456789), ("b [red]", None, True)],
            "a note",
        )
    )
    out = capsys.readouterr().out
    assert long in out and "12,345" in out and "0.1235" in out and "b [red]" in out and "yes" in out
    assert "a note" in out


def test_json_is_one_object_of_plain_numbers(capsys):
    sheet = Sheet("", ("a b/c", "n"), [(np.int64(3), NumBytes(2048)), (np.float32(0.5), None)])
    show_json({"rows": sheet.records(), "matrix": np.eye(2)})
    assert json.loads(capsys.readouterr().out) == {
        "rows": [{"a_b_c": 3, "n": 2048}, {"a_b_c": 0.5, "n": None}],
        "matrix": [[1.0, 0.0], [0.0, 1.0]],
    }


def test_a_heatmap_in_shades(capsys):
    show_heatmap(Heatmap("Use", np.array([[0, 1, 2], [4, 3, 0]]), "layers", "experts"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["Use", "0  ░▒", "1 █▓ "]
    assert lines[3] == "rows: layers; columns: experts 0 to 2; darkest 0, brightest 4"


def terminal(monkeypatch, width):
    console = Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        width=width,
        highlight=False,
    )
    monkeypatch.setattr(render, "console", lambda: console)
    return console.file


def test_a_heatmap_in_colour_has_two_rows_a_line_and_fits(monkeypatch):
    out = terminal(monkeypatch, width=20)
    show_heatmap(Heatmap("Use", np.arange(90.0).reshape(3, 30), "layers", "experts"))
    lines = out.getvalue().splitlines()
    assert lines[1].count("▀") == lines[2].count("▀") == 15
    assert "2 to a character" in " ".join(line.strip() for line in lines[3:])


def test_a_heatmap_of_nothing(capsys):
    show_heatmap(Heatmap("Empty", np.zeros((1, 2)), "layers", "experts"))
    assert "brightest 0" in capsys.readouterr().out


PRESETS = [
    ("25%", "auto", name, 1234.5, "39.22 (38.47 to 39.98)", "what it is " * 6)
    for name in ("near", "on-demand")
]
WIDE = Sheet(
    "Wide", ("budget", "link", "preset", "tokens a second", "TPOT ms", "summary"), PRESETS, "a note"
)


@pytest.mark.parametrize("width", [60, 80])
def test_a_table_wider_than_the_terminal_breaks_no_word_and_repeats_what_tells_rows_apart(
    monkeypatch, width
):
    out = terminal(monkeypatch, width)
    show_sheet(WIDE)
    said = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert max(map(len, said.splitlines())) <= width
    num_tables = said.count("┏")
    assert num_tables > 1 and said.count("Wide") == said.count("a note") == 1
    assert said.count("│ near") == said.count("│ on-demand") == num_tables
    for whole in (
        "1,234.5",
        "39.22 (38.47 to 39.98)",
        "what it is",
        "25%",
        "auto",
        "tokens",
        "second",
        "summary",
    ):
        assert whole in said, whole


def test_a_table_that_fits_is_one(monkeypatch):
    for width, num_tables in ((200, 1), (112, 1), (111, 1), (80, 2)):
        out = terminal(monkeypatch, width)
        show_sheet(WIDE)
        assert out.getvalue().count("┏") == num_tables, width
    out = terminal(monkeypatch, 30)
    show_sheet(Sheet("", ("", "what there is"), [], ""))
    assert out.getvalue().count("┏") == 1
