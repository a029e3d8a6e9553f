"""`moectl price`: a table, a picture and a receipt, the same twice, and one line for bad options."""

import json
from pathlib import Path

import pytest

from moectl.cli import main
from tests.helpers.said import problems

SMALL = ("--tokens", "48", "--length", "24", "--mixtures", "1", "--threads", "1", "--store", "no")
ASKED = ("--shortcuts", "zero,cache_aware,bits")


def test_a_small_price_list(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "prices.svg"
    assert main(["price", *SMALL, *ASKED, "--picture", str(picture)]) == 0
    said = capfd.readouterr().out
    assert "zero + cache_aware" in said or "1 mixtures are beaten" in said
    assert "not priced: 4 bits for all" in said and "moectl quantize" in said
    assert "exact loading" in picture.read_text() and ">zero<" in picture.read_text()
    lists = []
    for _ in range(2):
        assert main(["price", *SMALL, *ASKED, "--json"]) == 0
        lists.append(json.loads(capfd.readouterr().out))
    assert lists[0] == lists[1], "to the digit"
    exact, zero = lists[0]["rows"][:2]
    assert exact["loss"] == exact["loss_error"] == exact["saved_nbytes"] == 0 and exact["is_best"]
    assert zero["saved_share"] > 0.9 and zero["kl"] > 0
    receipt = lists[0]["receipt"]
    assert receipt["num_texts"] == 2 and receipt["num_scored"] == 24
    assert len(receipt["text_sha256"]) == 64 and "--seed 0" in receipt["command"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--shortcuts", "dorp"), "unknown shortcut 'dorp'; did you mean drop?"),
        (("--preset", "shadow"), "give one that is lossless"),
        (("--picture", "prices.png"), "a picture is written as .svg"),
        (("--tokens", "24"), "one text tells no error"),
    ],
)
def test_bad_options_take_one_line(
    options: tuple[str, ...], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["price", *SMALL, *options]) == 2
    assert says in problems(capfd.readouterr().err)
