"""What the demo says of its rows: a table of ratios, one sentence, and a picture whose names touch
nothing."""

import re
from dataclasses import replace

import pytest

from moectl.show.demonstration import Demonstration, DemoRow, drawing, sentence, sheet

QUARTER = "25%"
EXACT = {"kl": 0.0, "perplexity_ratio": 1.0, "top1_agreement": 1.0, "altered": 0}


def row(preset: str, times_full: float, *, budget: str = QUARTER, **quality: float) -> DemoRow:
    times = {"times_full": times_full, "lower": times_full - 0.1, "upper": times_full + 0.1}
    rest = {
        "hit_rate": 0.5,
        "moved_bytes": 1 << 20,
        "exposed_ms": 1.0,
        "ms_per_token": 6.0 * times_full,
    }
    return DemoRow(preset, budget, **times, **rest, **(EXACT | quality))


LOSSY = {
    "kl": 0.03,
    "perplexity_ratio": 1.035,
    "top1_agreement": 0.9,
    "altered": 7,
    "loss_error": 0.012,
}
ROWS = [
    row("full", 1.0, budget="100%"),
    row("on-demand", 3.9),
    row("near", 1.9),
    row("shadow", 1.02, perplexity_ratio=0.998, altered=9, loss_error=0.004),
    row("buddymoe", 2.7, **LOSSY),
    row("buddymoe", 1.5, budget="50%", **LOSSY),
]
SHOWN = Demonstration(
    ROWS, QUARTER, 64, "CPU, in the proportions of rtx3090-pcie4", "Two rounds.", {}
)


def test_the_table_has_ratios_with_their_spread_and_exact_rows_first() -> None:
    table = sheet(SHOWN)
    assert table.rows[1] == (
        "on-demand",
        "25%",
        "3.9 (3.8 to 4.0)",
        "0.500",
        "16.0 KiB",
        "exact",
        "100.0 %",
    )
    assert [line[5] for line in table.rows] == [
        *["exact"] * 3,
        "not distinguishable (-0.2 % +- 0.4)",
        *["3.5 % (+- 1.2)"] * 2,
    ]
    assert (
        table.note.startswith("CPU, in the proportions of")
        and "ms" not in " ".join(table.columns).split()
    )


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            ROWS,
            "(on-demand) was 3.9 times slower than with all of them there; the fastest way with "
            "the same output, near, was 1.9 times slower than full; the fastest of all, shadow, "
            "was as fast as full and altered the output, its loss not distinguishable (-0.2 % +- "
            "0.4) and 100 % of first choices the same.",
        ),
        (ROWS[:2], "(on-demand) was 3.9 times slower than with all of them there."),
        (
            [*ROWS[:2], replace(ROWS[4], times_full=0.8)],
            (
                "; the fastest of all, buddymoe, was 1.2 times faster than full and cost 3.5 % "
                "(+- 1.2) of perplexity."
            ),
        ),
        (
            [row("on-demand", 1.0), row("near", 1.2)],
            "(on-demand) was as fast as with all of them there.",
        ),
    ],
)
def test_the_sentence_is_of_the_rows(rows: list[DemoRow], said: str) -> None:
    assert sentence(replace(SHOWN, rows=rows)).endswith(said)


def test_json_has_all_of_it() -> None:
    said = SHOWN.records()
    assert said["seen"] == sentence(SHOWN) and said["rows"][3]["is_exact"] is False
    assert [row["is_distinguishable"] for row in said["rows"][3:5]] == [False, True]
    assert {"preset", "ms_per_token", "exposed_ms", "moved_bytes", "hit_rate"} <= said["rows"][
        0
    ].keys()


def test_every_preset_at_the_budget_is_named_once_in_the_picture() -> None:
    inside = drawing(SHOWN).inside
    names = re.findall(r'class="mark" [^>]*>([^<]+)<', inside)
    assert sorted(names) == ["buddymoe", "full", "near", "on-demand", "shadow"]
    assert "in the proportions of" in inside
