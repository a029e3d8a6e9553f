"""docs/lab/reproduction.md has every reproduction, and what it says is what they say."""

import re

import pytest

from moectl.show.render import Sheet
from tools.docs import reproduction
from tools.docs.reproduction import PAGE, page, part, written
from tools.reproductions.command import REPRODUCTIONS
from tools.reproductions.reasons import REASONS
from tools.reproductions.report import Claim, Reproduction

FOUND = Reproduction(
    name="toy",
    paper="A paper (2025), Table 1",
    sheets={
        "rates": Sheet(
            "Rates", ("policy", "paper", "ours"), [("a|b", 0.5, 0.25), ("c", None, 1e4)], "of 2"
        )
    },
    claims=(
        Claim("a is first", "yes", "no", False),
        Claim("c", "-", "1", None),
        Claim("d", "1", "1", True),
    ),
    assumed=("nothing",),
)


def test_a_part_has_all_that_was_found() -> None:
    text = part(FOUND, "toy")
    assert "**1 of 2 statements agree.**" in text and FOUND.available in text
    assert (
        "| a is first | yes | no | DISAGREES |" in text and "| c | - | 1 | cannot be said |" in text
    )
    assert (
        "| a\\|b | 0.5 | 0.25 |" in text and "| c | - | 10,000.0 |" in text and "\nof 2\n" in text
    )
    assert "- nothing\n" in text and "Why we disagree" not in text
    assert written(page({"toy": text, "other": text})) == {"toy": text, "other": text}


def test_the_page_has_every_reproduction() -> None:
    """A new one is added by `python -m tools.docs.reproduction NAME`."""
    assert written(PAGE.read_text(encoding="utf-8")).keys() == REPRODUCTIONS.keys()


def test_every_disagreement_has_its_reason_and_no_reason_is_left_over() -> None:
    for name, text in written(PAGE.read_text(encoding="utf-8")).items():
        apart = re.findall(r"^\| (.+?) \| .* \| DISAGREES \|$", text, re.MULTILINE)
        for claim in apart:
            assert any(claim.startswith(reason.claims) for reason in REASONS[name]), (
                f"{name}: why {claim}?"
            )
        for beginning in [each for reason in REASONS.get(name, ()) for each in reason.claims]:
            assert any(claim.startswith(beginning) for claim in apart), (
                f"{name}: {beginning} agrees"
            )
        assert all(reason.why in text for reason in REASONS.get(name, ()))


def test_one_is_written_anew_and_the_others_stay(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduction, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(reproduction, "REPRODUCTIONS", {"one": lambda: FOUND, "two": lambda: FOUND})
    reproduction.main(())
    before = written((tmp_path / "page.md").read_text())
    assert list(before) == ["one", "two"] and before["one"] == part(FOUND, "one")
    monkeypatch.setattr(reproduction, "REPRODUCTIONS", {"two": None, "one": lambda: FOUND})
    reproduction.main(["one"])
    assert written((tmp_path / "page.md").read_text()) == before
