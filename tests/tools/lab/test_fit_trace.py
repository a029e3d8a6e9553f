"""`moectl fit-trace` as a user runs it."""

import pytest

from moectl.cli import main
from tests import TRACE
from tests.moectl.conftest import Said


def test_fitting_to_a_trace_and_simulating_it(said: Said) -> None:
    fitted = said("fit-trace", "--like", str(TRACE))
    found = {row["statistic"]: row for row in fitted["rows"]}
    assert found["concentration"]["reached"] == pytest.approx(
        found["concentration"]["wanted"], abs=0.01
    )
    assert fitted["dials"]["tokens"] == 504 and fitted["dials"]["prompt"] == 24
    simulated = said("simulate", "--synthetic", fitted["synthetic"], "--model", "bundled")
    assert simulated["counters"]["requests"] > 10_000


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--hits", "lru"), 2, "write POLICY:HELD=RATE"),
        (("--hits", "mru:10=.5"), 2, "unknown eviction policy 'mru'"),
        (("--hits", "lru:10=.5", "--like", str(TRACE)), 2, "not both"),
        (("--like", "none.parquet"), 3, "there is no trace file"),
    ],
)
def test_what_cannot_be_fitted(
    options: tuple[str, ...], code: int, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit-trace", *options]) == code
    assert says in capfd.readouterr().err
