"""No table shows a toy model on a data sheet in absolute time, and each says what its times rest
on."""

import re
from pathlib import Path

import pytest

from moectl.cli import main
from tests import TRACE

pytestmark = pytest.mark.slow

ABSOLUTE = re.compile(r"\bms\b|tokens/s|\bseconds?\b")
REPLAYED = ("--trace", str(TRACE), "--model", "bundled", "--machine", "rtx3090-pcie4")


@pytest.mark.parametrize(
    "command",
    [
        ("simulate", *REPLAYED, "--compare", "lru,near,shadow"),
        ("bench", "--simulate", "--trace", str(TRACE), "--budgets", "25%", "--presets", "buddymoe"),
        ("split", *REPLAYED),
        ("inspect", "splits"),
    ],
    ids=lambda command: command[0],
)
def test_a_toy_on_a_data_sheet_has_ratios_alone(
    command: tuple[str, ...], split_stored: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--store", str(split_stored)]) == 0
    said = capfd.readouterr().out
    assert not ABSOLUTE.search(said), ABSOLUTE.search(said)
    assert "simulated on virtual time" in said and "toy" in said


@pytest.fixture(scope="module")
def split_stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("honest") / "moe.duckdb"
    assert main(["split", *REPLAYED, "--solver", "greedy", "--store", str(store), "--json"]) == 0
    return store


def test_a_large_model_has_estimates_of_its_times(capfd: pytest.CaptureFixture[str]) -> None:
    dials = "tokens=80,requests=2,prompt=8,seed=3"
    assert main(["simulate", "--synthetic", dials, "--model", "mixtral-8x7b"]) == 0
    said = capfd.readouterr().out
    assert (
        "ms a token" in said
        and "simulated on virtual time, bandwidths of a100-pcie4: lower bounds" in said
    )
