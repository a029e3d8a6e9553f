"""The rehearsal in full size, on a small checkpoint in the same layout."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.bench.disk.device_reads import Place, cached_rate, copy_rate, direct_rate, keep
from tools.bench.disk.full_size import checkpoint, rehearse
from tools.bench.disk.full_size_process import FullSizeRequest
from tools.bench.disk.full_size_tables import Rehearsal, tables
from tools.bench.measuring import read_nbytes

pytestmark = pytest.mark.slow

SMALL = {
    "num_hidden_layers": 2,
    "num_experts": 16,
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "vocab_size": 300,
}
# bytes of an expert in its slot; experts
NAME = "qwen3-30b-a3b-fp8"
EXPERT = 3 * (256 * 256 + 64)
EXPERTS = 2 * 16


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with checkpoint(NAME, changes=SMALL, keep=None) as made:
        yield made
    assert not made.exists()


@pytest.fixture(scope="module")
def found(folder: Path) -> Rehearsal:
    return rehearse(
        folder, FullSizeRequest(("50%",), tokens=2, prompt=24, of_prompt="50%"), profiled=8
    )


def test_a_rehearsal_measures_the_same_loads_cold_and_warm(found: Rehearsal) -> None:
    (cell,) = found.measured.cells
    assert found.measured.opening.expert_nbytes == EXPERT * EXPERTS
    assert EXPERT * EXPERTS // 2 <= cell.slots_nbytes < EXPERT * EXPERTS
    assert cell.cold.loaded_nbytes == cell.warm.loaded_nbytes and 0 < cell.hit_rate < 1
    assert cell.cold.seconds > cell.cold.waited_s >= 0
    assert min(rate for one in (cell.cold, cell.warm) for rate in (one.rate, one.beside)) > 0
    assert found.measured.prompt.is_finite and found.measured.prompt.loaded_nbytes > 0
    assert found.planned["model"] and found.profile_s > 0


def test_every_measurement_has_its_place_in_a_table(found: Rehearsal) -> None:
    titles = {table.title: table for table in tables(found)}
    assert [*titles] == [
        "Opening",
        "Decoding, cold",
        "Decoding, warm",
        "More tokens at once",
        "Planned and measured",
    ]
    assert all(len(row) == len(table.columns) for table in titles.values() for row in table.rows)
    assert found.planned["memory"]["all_experts_nbytes"] == pytest.approx(
        EXPERT * EXPERTS, rel=0.01
    )


def test_a_checkpoint_that_is_there_is_used_and_stays(folder: Path) -> None:
    with checkpoint(folder.name, changes=SMALL, keep=folder.parent) as same:
        assert same == folder
    assert folder.exists()


def test_too_little_disk_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with (
        pytest.raises(SystemExit, match="GB of disk"),
        checkpoint(NAME, changes=SMALL | {"vocab_size": 10**11}, keep=tmp_path),
    ):
        raise AssertionError("it was made")
    assert not [*tmp_path.iterdir()]


def test_kept_bytes_come_without_the_device(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(3 << 20))
    places = [Place(file, 100, 2 << 20), Place(file, 5, 7)]
    keep(places)
    before = read_nbytes()
    assert cached_rate(places) > 0 and copy_rate(1 << 12, 40) > 0
    assert read_nbytes() == before
    assert direct_rate(places) == 0 or read_nbytes() - before >= 2 << 20
