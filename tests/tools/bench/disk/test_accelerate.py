"""Disk links side by side: what a process reports, whose turn it is, and what a ratio is of."""

from pathlib import Path

import pytest

from tests.conftest import Checkpoint
from tools.bench.disk import accelerate as disk
from tools.bench.disk.accelerate import PEERS, rows, sheet
from tools.bench.disk.way import OURS, Reading, Way, _experts_on_disk, measure

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(checkpoint: Checkpoint) -> Path:
    return checkpoint("olmoe", "fused")


@pytest.mark.parametrize(
    "way", [*PEERS, Way(OURS, "2x", "disk", "exact")], ids=lambda way: way.name
)
def test_a_process_reports_time_bytes_and_peak(folder: Path, way: Way) -> None:
    found = measure(way, folder, tokens=2)
    assert found.cold_s > 0 and found.warm_s > 0 and found.peak_nbytes > 50 << 20
    assert found.warm_nbytes <= found.cold_nbytes


def test_only_experts_are_on_disk(folder: Path) -> None:
    places = _experts_on_disk(folder)
    assert [name for name, place in places.items() if place == "disk"] == [
        "model.layers.0.mlp.experts",
        "model.layers.1.mlp.experts",
    ]
    assert {"model.embed_tokens", "model.layers.0.mlp.gate", "lm_head"} <= places.keys()
    assert "model.layers.0.self_attn" in places and "model.layers.0.self_attn.q_proj" not in places


def test_a_ratio_is_to_the_better_peer_of_the_round(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    ours = Way(OURS, "8x", "disk", "exact")
    asked = []
    given = set()

    def told(way: Way, folder: Path, *, tokens: int) -> Reading:
        asked.append(way)
        given.add(folder)
        seconds = {PEERS[0]: 4.0, PEERS[1]: 6.0, ours: 2.0 if len(asked) <= 3 else 1.0}[way]
        return Reading(seconds, seconds / 2, 8 << 20, 0, 1 << 20)

    monkeypatch.setattr(disk, "in_process", told)
    found = rows(folder, rounds=2, tokens=1, ways=(*PEERS, ours))
    assert asked == [*PEERS, ours, PEERS[1], ours, PEERS[0]]
    assert given == {folder}
    assert found[2].cold_times == found[2].warm_times == (3.0, 2.0, 4.0)
    assert found[1].cold_times[0] == pytest.approx(4 / 6) and found[0].cold_times == (1.0, 1.0, 1.0)
    assert sheet(found, rounds=2, tokens=1).rows[2][:3] == (
        "moectl, 8x, link disk, exact",
        "1500",
        "3.00 (2.00 to 4.00)",
    )


def test_a_packed_way_reads_the_packed_files(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    packed = Way(OURS, "8x", "direct", "exact", is_packed=True)
    read = {}

    def told(way: Way, folder: Path, *, tokens: int) -> Reading:
        read[way] = {path.name for path in folder.glob("*.safetensors")}
        return Reading(1.0, 1.0, 0, 0, 1 << 20)

    monkeypatch.setattr(disk, "in_process", told)
    rows(folder, rounds=1, tokens=1, ways=(*PEERS, packed))
    assert "model-experts-000.safetensors" in read[packed] and read[PEERS[0]] == {
        "model.safetensors"
    }
