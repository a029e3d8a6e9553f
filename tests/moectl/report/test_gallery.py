"""`moectl report FOLDER`: pictures of what a store holds, those in docs/pictures among them."""

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pytest

from artifacts.shape import Shape
from artifacts.store.runs import ModelInfo, RunInfo, utc_now
from artifacts.store.store import Store
from artifacts.traces.parquet import read_parquet, to_table
from moectl.bench.ledger import LIVE, BenchJob, BenchRow, Ledger
from moectl.cli import main
from tests import ROOT, TRACE

pytestmark = pytest.mark.slow

MODEL = ModelInfo(
    "demo", "d" * 64, "olmoe", Shape(num_layers=8, num_experts=32, top_k=4, expert_nbytes=24_576)
)
OF_TRACE = {"hit-rates", "residency", "routing", "skew"}


def run(command: str) -> RunInfo:
    return RunInfo(command, MODEL.model_id, utc_now(), 0.0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the trace that the tests replay, alone."""
    path = tmp_path_factory.mktemp("gallery") / "moe.duckdb"
    with Store.open(path) as held:
        held.add_model(MODEL)
        held.write_run(run("trace"), {"traces": to_table(read_parquet(TRACE, num_experts=32))})
    return path


@pytest.fixture(scope="module")
def measured(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same store with losses of replicas and a bench."""
    path = tmp_path_factory.mktemp("measured") / "moe.duckdb"
    path.write_bytes(store.read_bytes())
    places = list(product(range(8), range(32), (1, 4)))
    columns = dict(zip(("layer", "expert", "bits"), zip(*places, strict=True), strict=True))
    losses = [4.0**-bits * (1 + layer) for layer, _, bits in places]
    same = dict.fromkeys(("mse", "relative", "gated", "energy"), losses)
    rest = {"samples": [9] * len(places), "basis": ["own"] * len(places)}
    with Store.open(path) as held:
        held.write_run(run("quantize"), {"quant_loss": pa.table(columns | same | rest)})
    row = BenchRow(
        "full",
        "100%",
        "rtx3090-pcie4",
        LIVE,
        tpot_ms=5.0,
        kl=0.0,
        perplexity_ratio=1.0,
        top1_agreement=1.0,
    )
    row = replace(
        row, peak_fast_bytes=1 << 20, tpot_quartiles=(4.0, 6.0), ttft_quartiles=(4.0, 6.0)
    )
    lossy = {"kl": 0.1, "perplexity_ratio": 1.02, "top1_agreement": 0.9}
    rows = [row, replace(row, preset="near", budget="25%", tpot_ms=10.0)]
    rows += [
        replace(row, preset="shadow", budget=budget, tpot_ms=6.0, **lossy)
        for budget in ("12.5%", "25%")
    ]
    ledger = Ledger(
        path, BenchJob("text", "digest", 9, 0, {"mode": LIVE, "model": "d"}), model=MODEL
    )
    for one in rows:
        ledger.write(one, by_layer=(), started_at=utc_now(), seconds=1.0, beside={})
    return path


def test_pictures_of_the_documents_are_those_of_the_trace(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else: draw them again and look at them."""
    assert main(["report", str(tmp_path / "drawn"), "--store", str(store)]) == 0
    said = capfd.readouterr().out
    assert (
        "no bits.svg: it needs replicas: moectl quantize" in said and "no time-quality.svg" in said
    )
    drawn = {path.stem: path for path in (tmp_path / "drawn").iterdir()}
    assert drawn.keys() == OF_TRACE
    for path in drawn.values():
        assert path.read_bytes() == (ROOT / "docs" / "pictures" / path.name).read_bytes(), path.name


def test_all_of_a_store(measured: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "--store", str(measured), "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert {Path(path).stem for path in said["pictures"]} == OF_TRACE | {"bits", "time-quality"}
    assert said["missing"] == {}
    for path in said["pictures"]:
        assert ElementTree.parse(path).getroot().attrib["role"] == "img"
    shown = (tmp_path / "time-quality.svg").read_text()
    assert re.findall(r'class="mark" [^>]*>([^<]+)<', shown) == ["shadow", "full", "near"]
    assert "CPU, in the proportions of rtx3090-pcie4" in shown and "25% of the experts" in shown


def test_every_token_of_the_animation_is_drawn_and_one_is_seen_without_it() -> None:
    text = (ROOT / "docs" / "pictures" / "residency.svg").read_text()
    assert text.count('class="moment"') == 23 and text.count('class="moment last"') == 1
    assert "prefers-reduced-motion:reduce" in text


def test_a_store_without_anything_to_draw(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Store.open(tmp_path / "moe.duckdb") as held:
        held.add_model(MODEL)
    assert main(["report", str(tmp_path / "drawn"), "--store", str(tmp_path / "moe.duckdb")]) == 5
    assert "holds nothing to draw" in capfd.readouterr().err and not (tmp_path / "drawn").exists()
