"""The atlas of locality: its laws on a small trace, and its page by its command."""

import sys
from pathlib import Path

import numpy as np
import pytest

from artifacts.shape import Shape
from artifacts.traces.synthetic import generate, parse_dials
from runtime.policies.presets import Scope
from tools.bench.traces.real import Prepared
from tools.lab import atlas

SMALL = Shape(num_layers=2, num_experts=12, top_k=2, expert_nbytes=1)


@pytest.fixture(scope="module")
def place() -> atlas.Place:
    dials = parse_dials("skew=1,locality=0.5,tokens=120,prompt=0,requests=6")
    return atlas.Place.of("small", Prepared(generate(dials, SMALL, detailed=False), 12))


def test_belady_hits_most_and_stack_policies_never_lose_by_room(place: atlas.Place) -> None:
    found = {name: [cell.hits.sum() for cell in cells] for name, cells in atlas.hits(place).items()}
    for name, counts in found.items():
        assert all(np.array(counts) <= found["belady"]), name
    for name in ("lru", "belady"):
        assert (np.diff(found[name]) >= 0).all(), name


def test_stack_distances_are_the_hits_of_lru_by_layer(place: atlas.Place) -> None:
    distances = atlas.stack_distances(place)
    for slots in (3, 6, 9):
        counters = place.prepared.replayed({"eviction": "lru"}, Scope.LAYER, slots / 12)
        assert (distances < slots).sum() == counters.totals()["hits"]


def test_a_hot_set_serves_best_what_it_was_learnt_on(place: atlas.Place) -> None:
    first, second = place.counts[:3], place.counts[3:]
    own = atlas.served(atlas.hot(second.sum(axis=0)), second)
    other = atlas.served(atlas.hot(first.sum(axis=0)), second)
    assert own[0] >= other[0] and own.shape == (1001,)
    assert atlas.hot(place.counts.sum(axis=0)).sum(axis=1).tolist() == [3, 3]


def test_the_page_is_made_by_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "atlas.md"
    page.write_text("<!-- atlas: -->\n<!-- :atlas -->\n")
    told = ["--only", "gpt-oss-20b", "--tokens", "16", "--write", str(page)]
    monkeypatch.setattr(atlas, "SHARES", (0.25, 0.5))
    monkeypatch.setattr(sys, "argv", ["atlas", *told, "--pictures", str(tmp_path / "drawn")])
    atlas.main()
    text = page.read_text()
    assert "| gpt-oss-20b | 0.125, " in text and "| `belady` | " in text and "16 tokens" in text
    assert (tmp_path / "drawn" / "gpt-oss-20b.svg").read_text().startswith("<svg")
    assert capsys.readouterr().out.splitlines()[-1] in text
