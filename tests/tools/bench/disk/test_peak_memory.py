"""The measurement of peak memory: what one process reports, and when the claim does not hold."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest

from tools.bench.disk.peak_memory import NOTHING, PLAIN, Row, _checkpoint, _verdict, measure
from tools.make import checkpoint

SHAPE = {"layers": 2, "experts": 8, "hidden": 64, "intermediate": 32}
EXPERT = 3 * 64 * 32 * 2  # bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys, "argv", ["make_checkpoint", str(made), *(f"--{k}={v}" for k, v in SHAPE.items())]
        )
        checkpoint.main()
    return made


@pytest.mark.parametrize(("name", "experts"), [(NOTHING, 0), (PLAIN, 16), ("25%", 4), ("2x", 2)])
def test_a_process_reports_its_peak_and_the_experts_it_held(
    folder: Path, name: str, experts: int
) -> None:
    row = measure(name, folder, tokens=3)
    assert row.expert_nbytes == experts * EXPERT
    assert row.peak_nbytes > 50 << 20
    assert (row.ms_per_token > 0) == (name != NOTHING)


def test_a_checkpoint_that_is_there_is_used(folder: Path) -> None:
    with _checkpoint(Namespace(folder=folder)) as found:
        assert found == folder


def test_a_session_that_grew_by_all_experts_fails() -> None:
    def rows(grown: int) -> list[Row]:
        return [
            Row(name, peak, held, 0.0, 1.0)
            for name, peak, held in (("", 100, 0), ("", 900, 500), ("", grown, 90))
        ]

    assert _verdict(rows(400)) == 0
    assert _verdict(rows(600)) == 1
