"""`moectl price`: a table, a picture and a receipt, the same twice, and one line for bad options."""

import json
from pathlib import Path

import pytest

from moectl.cli import main
from tests.helpers.said import problems

SMALL = ("--tokens", "48", "--length", "24", "--mixtures", "0", "--threads", "1", "--store", "no")
ASKED = ("--shortcuts", "zero,bits")


def test_a_small_price_list(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The table has the digits of the JSON of an earlier run."""
    picture = tmp_path / "prices.svg"
    assert main(["price", *SMALL, *ASKED, "--json", "--picture", str(picture)]) == 0
    said = json.loads(capfd.readouterr().out)
    assert "exact loading" in picture.read_text() and ">zero<" in picture.read_text()
    exact, zero = said["rows"]
    assert exact["loss"] == exact["loss_error"] == exact["saved_nbytes"] == 0
    assert zero["saved_share"] > 0.9 and zero["kl"] > 0
    receipt = said["receipt"]
    assert receipt["num_texts"] == 2 and receipt["num_scored"] == 24
    assert len(receipt["text_sha256"]) == 64 and "--seed 0" in receipt["command"]
    assert main(["price", *SMALL, *ASKED]) == 0
    table = capfd.readouterr().out
    assert f"{zero['loss']:.4f} ± {zero['loss_error']:.4f}" in table
    assert f"{zero['price']:.4f} ± {zero['price_error']:.4f}" in table
    assert "not priced: 4 bits for all" in table and "moectl quantize" in table


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
