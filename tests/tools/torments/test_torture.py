"""The torture tool: what is lost is told, whatever it was, and does not end the rest."""

from pathlib import Path

import pytest

from tests.tools.torments.fragile import Bad, Fragile
from tools.torments import cases, torture
from tools.torments import cell as torture_cell
from tools.torments.cell import Cell


def test_losses_are_told_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell(Fragile, tmp_path, seed=0)
    whole, broken, aborted, again = (cell.run(number) for number in (0, 1, 2, 0))
    assert (whole.loss, broken.loss) == ("", "14: a promise")
    assert "ended with -6" in aborted.loss
    assert again.fault == whole.fault and not again.loss, (
        "a number repeats its case, in a new process"
    )
    monkeypatch.setattr(torture_cell, "SLOWEST_S", 0.0)
    assert "no end" in cell.run(1).loss


def test_what_cannot_be_prepared_is_a_loss(tmp_path: Path) -> None:
    assert "no ground to stand on" in Cell(Bad, tmp_path, seed=0).run(0).loss


def test_losses_fall_to_their_class() -> None:
    assert cases.class_of(Fragile, "14: less than one expert") == 14
    assert cases.class_of(Fragile, "no number") == 13


def test_each_torment_has_classes_of_the_suite() -> None:
    known = torture._classes()
    for name in cases.names():
        assert set(cases.load(name).classes) <= set(known), name
