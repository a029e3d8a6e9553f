"""docs/lab/reproduction.md has every reproduction, and what it says is what they say."""

import re

import pytest

from moectl.show.render import Sheet
from tools.docs import reproduction
from tools.docs.reproduction import PAGE, page, part, written
from tools.reproductions.command import REPRODUCTIONS
from tools.reproductions.judged import above, by_seed, left_out
from tools.reproductions.reasons import REASONS
from tools.reproductions.report import NOT_TESTABLE, Kind, Reproduction
from tools.reproductions.shown import SHOWN

FOUND = Reproduction(
    name="toy",
    paper="A paper (2025), Table 1",
    sheets={
        "rates": Sheet(
            "Rates", ("policy", "paper", "ours"), [("a|b", 0.5, 0.25), ("c", None, 1e4)], "of 2"
        )
    },
    claims=(
        by_seed("a is first", "yes", [0.0], off="lru", null=[0.0], test=above()),
        by_seed("d", "1", [1.0], off="lru", null=[0.0], test=above()),
        left_out("c", "-", "a GPU", NOT_TESTABLE),
    ),
    assumed=("nothing",),
)


def test_a_part_has_all_that_was_found() -> None:
    text = part(FOUND, "toy")
    assert f"**{FOUND.counted}.**" in text and FOUND.available in text
    assert "| lru: 0, fails | measured | DISAGREES |" in text
    assert "| c | - | a GPU | - | - | left out | not testable here |" in text
    assert (
        "| a\\|b | 0.5 | 0.25 |" in text and "| c | - | 10,000.0 |" in text and "\nof 2\n" in text
    )
    assert "- nothing\n" in text and "Why we disagree" not in text
    whole = page({"toy": text, "other": text})
    assert written(whole) == {"toy": text, "other": text}
    assert "| all | 2 of 4, 50% | 2 not testable here |" in whole


def test_the_page_has_every_reproduction() -> None:
    """A new one is added by `python -m tools.docs.reproduction NAME`."""
    assert written(PAGE.read_text(encoding="utf-8")).keys() == REPRODUCTIONS.keys()


def test_every_row_has_its_class_and_null_test_and_every_disagreement_its_reason() -> None:
    for name, text in written(PAGE.read_text(encoding="utf-8")).items():
        table = text.split("| --- |", 1)[1].split("\n\n", 1)[0]
        rows = [line[2:-2].split(" | ") for line in table.splitlines()[1:]]
        for *_, spread, null, kind, verdict in rows:
            assert kind in [*Kind], kind
            measured = re.search(r": .+, (fails|PASSES)$", null)
            assert (kind == "measured") == bool(measured) == (spread != "-")
            assert verdict != "agrees" or not measured or measured[1] == "fails"
        apart = [row[0] for row in rows if row[-1] in ("DISAGREES", "not told apart")]
        reasons = REASONS.get(name, ())
        for row in rows:
            explained = row[-1] != "DISAGREES" or row[0].startswith(
                tuple(each for reason in reasons for each in reason.claims)
            )
            assert explained, f"{name}: why {row[0]}?"
        for beginning in [each for reason in reasons for each in reason.claims]:
            assert any(claim.startswith(beginning) for claim in apart), f"{name}: {beginning}"
        assert all(reason.why in text for reason in reasons)


def test_what_each_paper_shows_is_at_the_top() -> None:
    head = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    assert all(text in " ".join(head.split()) for text in SHOWN.values())
    assert len(SHOWN) == 5


def test_one_is_written_anew_and_the_others_stay(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduction, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(
        reproduction, "REPRODUCTIONS", dict.fromkeys(("one", "two"), lambda trace: FOUND)
    )
    reproduction.main(())
    before = written((tmp_path / "page.md").read_text())
    assert list(before) == ["one", "two"] and before["one"] == part(FOUND, "one")
    monkeypatch.setattr(reproduction, "REPRODUCTIONS", {"two": None, "one": lambda trace: FOUND})
    reproduction.main(["one"])
    assert written((tmp_path / "page.md").read_text()) == before
