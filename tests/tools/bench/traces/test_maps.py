"""The benchmark of matching runs at any size, and its search from the start finds what the one
layer by layer does."""

import numpy as np
import pytest

from tools.bench.traces import maps as bench_maps
from tools.bench.traces.maps import Sizes, next_layer, random_maps, whole_prefix

SMALL = (
    "--maps",
    "6",
    "--layers",
    "4",
    "--experts",
    "5",
    "--hidden",
    "32",
    "--heads",
    "2",
    "--positions",
    "3",
)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_table_of_times(
    dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["bench_maps", *SMALL, "--passes", "2", "--requests", "2", "--dtype", dtype]
    )
    bench_maps.main()
    table = capsys.readouterr().out
    assert "from the start / layer by layer" in table and f"6 maps, L=4 E=5 H=32, {dtype}" in table
    rows = [line.split("│") for line in table.splitlines() if line.startswith("│")]
    assert len(rows) == 10 and all(float(row[2].replace(",", "")) > 0 for row in rows)


def test_both_searches_find_the_same() -> None:
    sizes = Sizes(maps=6, layers=4, experts=5, hidden=8)
    maps = random_maps(sizes, "float32")
    seen = random_maps(sizes, "float32").probabilities[:2]
    flat = np.ascontiguousarray(maps.probabilities).reshape(6, -1)
    under_way = maps.begin(2)
    for layer in range(4):
        found = next_layer(under_way, seen[:, layer])
        again = whole_prefix(flat, seen[:, : layer + 1])
        assert again * maps._inverse[layer] == pytest.approx(found, abs=1e-5)
