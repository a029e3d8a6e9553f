"""Reading layouts side by side: every way is measured on its own files."""

from pathlib import Path

from runtime.model.files.checkpoint import open_checkpoint
from runtime.model.files.pack import pack
from runtime.model.open import open_model
from tests.conftest import Checkpoint
from tools.bench.disk.reads import IN_FLIGHT, rows, sheet


def test_every_layout_is_read_over_both_links(checkpoint: Checkpoint, tmp_path: Path) -> None:
    fused = checkpoint("olmoe", "fused")
    packed = pack(open_model(str(fused)), open_checkpoint(fused), tmp_path / "packed").folder
    folders = {"fused": fused, "published": checkpoint("olmoe"), "packed": packed}
    found = rows(folders, rounds=2)
    assert [(row.layout, row.link, row.in_flight) for row in found] == [
        (layout, link, count)
        for layout in folders
        for link in ("disk", "direct")
        for count in IN_FLIGHT
    ]
    assert found[0].cold_ratio == 1 and all(row.cold_ms > 0 < row.warm_ms for row in found)
    assert len(sheet(found, rounds=2).rows) == len(found)
