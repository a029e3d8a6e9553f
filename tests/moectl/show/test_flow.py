"""Text as it comes: verbatim to a pipe, in whole words on a terminal."""

import pytest

from moectl.show import flow as module
from moectl.show.flow import _Words, flow


def flowed(pieces: list[str], width: int) -> str:
    words = _Words(width)
    return "".join([*map(words.add, pieces), words.rest()])


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["one two th", "ree"], "one two \nthree"),
        (["one two", " ", "three"], "one two \nthree"),
        (["one\ntwo three"], "one\ntwo three"),
        (["    def f", "(x)"], "    def \nf(x)"),
        (["a" * 25], "a" * 25),
        (["ab ", "c" * 25], "ab " + "c" * 25),
        (["漢字漢字", "漢字"], "漢字漢字漢字"),
        (["one two  ", "  x"], "one two  \nx"),
    ],
)
def test_lines_break_between_words(pieces: list[str], shown: str) -> None:
    assert flowed(pieces, 10) == shown


def test_words_are_shown_as_soon_as_they_are_whole() -> None:
    words = _Words(80)
    assert [words.add(piece) for piece in ("one t", "wo", " ", "three")] == ["one ", "", "two ", ""]
    assert words.rest() == "three"


def test_a_pipe_has_the_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    flow(["one ", "tw", "", "o  \n"], prompt="zero")
    assert capsys.readouterr().out == "one two  \n\n"


def test_a_terminal_has_the_prompt_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module,
        "Console",
        lambda **options: console(force_terminal=True, width=10, color_system=None, **options),
    )
    flow([" two", " three"], prompt="zero")
    assert capsys.readouterr().out == "zero two \nthree\n"


console = module.Console
