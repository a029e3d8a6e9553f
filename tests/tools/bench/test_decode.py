"""The tables of speed: everything measured once a round, put into a page, and held against what was
committed."""

import json
from pathlib import Path

import pytest
import torch

from artifacts.errors import BadInput
from profilers.hardware.load_times import TimingEffort
from tests.conftest import Checkpoint
from tools.bench import decode as bench_decode
from tools.bench import performance
from tools.bench.decoding import link as bench_link
from tools.bench.decoding import prefill as bench_prefill
from tools.bench.decoding import resident as bench_resident
from tools.bench.decoding import threads as bench_threads
from tools.bench.performance import Ratio, Section, Table

pytestmark = pytest.mark.slow

PAGE = "# Speed\n\n<!-- resident: -->\nold\n<!-- :resident -->\nwords\n"


def test_a_table_has_every_implementation(checkpoint: Checkpoint) -> None:
    table = bench_resident.table("tiny", checkpoint("olmoe"), torch.float32, rounds=2, tokens=2)
    names = [*bench_resident.STOCK, *bench_resident.OURS]
    assert [row[0] for row in table.rows] == names and all(float(row[1]) > 0 for row in table.rows)
    assert [row[3] for row in table.rows].count("1.000 to 1.000") == 1, (
        "the fastest of transformers'"
    )
    assert list(table.ratios) == [f"tiny, float32, {own}" for own in bench_resident.OURS]
    assert all(ratio.lower <= ratio.median <= ratio.upper for ratio in table.ratios.values())


def test_threads_are_measured_as_far_as_there_are_cores(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_threads.os, "cpu_count", lambda: 2)
    table = bench_threads.table("tiny", checkpoint("olmoe"), rounds=1, tokens=2)
    assert [row[0] for row in table.rows] == [1, 2] and table.rows[0][2] == "1.00"
    assert all(float(row[1]) > 0 for row in table.rows)


def test_a_link_is_measured_and_simulated(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_link, "PRESETS", ("on-demand", "mixtral-offloading"))
    monkeypatch.setattr(bench_link, "BUDGETS", ("50%",))
    monkeypatch.setattr(bench_link, "DECIDING", 1)
    effort = TimingEffort(lengths=(4,), turns=2)
    table = bench_link.table(
        "tiny", checkpoint("olmoe"), "20MB/s", rounds=1, tokens=4, effort=effort
    )
    assert [row[:2] for row in table.rows] == [("on-demand", "50%"), ("mixtral-offloading", "50%")]
    assert all(float(row[3]) > 0 and float(row[4]) > 0 for row in table.rows)
    for row, ratio in zip(table.rows, table.ratios.values(), strict=True):
        assert ratio.median == pytest.approx(max(float(row[5]), 1 / float(row[5])), rel=0.01)


def test_a_prompt_is_held_against_the_longer_of_two(checkpoint: Checkpoint) -> None:
    table = bench_prefill.table("tiny", checkpoint("olmoe"), rounds=1, length=16)
    slow, alike, fast = (float(row[4]) for row in table.rows)
    assert slow == pytest.approx(2 * alike, abs=2) and alike == pytest.approx(2 * fast, abs=2)
    for row, ratio in zip(table.rows, table.ratios.values(), strict=True):
        prompt, resident, nbytes = (float(row[column]) for column in (1, 3, 4))
        rounding = 0.51 * (1 + ratio.median)
        assert prompt == pytest.approx(ratio.median * max(resident, nbytes), abs=rounding)
        assert 0 < float(row[5].rstrip("%")) <= 100


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["bench_decode", *map(str, arguments)])
    return bench_decode.main()


def test_tables_come_into_a_page_and_are_checked(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    little = ("--model", checkpoint("olmoe"), "--only", "resident", "--rounds", 2, "--tokens", 2)
    assert run(monkeypatch, *little, "--write", page) == 0
    text = page.read_text()
    assert (
        "old" not in text and text.endswith("<!-- :resident -->\nwords\n") and "| moectl |" in text
    )
    assert (
        "`python -m tools.bench.decode --model" in text
        and "torch thread" in text
        and ", commit " in text
    )
    committed = json.loads(page.with_suffix(".json").read_text())
    for factor, code in ((1e3, 0), (1e-3, 1)):
        scaled = {
            name: {key: factor * value for key, value in own.items()}
            for name, own in committed.items()
        }
        page.with_suffix(".json").write_text(json.dumps(scaled))
        capsys.readouterr()
        assert run(monkeypatch, *little, "--check", "--page", page) == code
        out = capsys.readouterr().out
        assert out.count("worse: resident: ") == (len(committed) if code else 0)
        assert f"{len(committed)} ratios, of which {len(committed) * code} are worse" in out
    assert page.read_text() == text, "a check writes nothing"


def test_worse_is_what_exceeds_the_spread() -> None:
    committed = {"one": Ratio(0.5, 0.45, 0.55), "sharp": Ratio(1.0, 1.0, 1.0)}
    assert (
        performance.worse(
            {"one": Ratio(0.59, 0, 9), "sharp": Ratio(1.04, 1, 2), "new": Ratio(9, 9, 9)}, committed
        )
        == []
    )
    assert performance.worse({"one": Ratio(0.3, 0, 9)}, committed) == [], "better is no fault"
    [line] = performance.worse({"one": Ratio(0.61, 0, 9)}, committed)
    assert line == "one: 0.610, committed 0.500 with a spread of 0.100"
    assert performance.worse({"sharp": Ratio(1.06, 1, 2)}, committed), "5 % at least"


def test_sections_that_were_not_measured_stay(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    ratio = Ratio(1.0, 0.9, 1.1)
    page.write_text(PAGE)
    page.with_suffix(".json").write_text(
        '{"disk: a": {"median": 2, "lower": 1, "upper": 3}, "resident: gone": {}}'
    )
    with pytest.raises(BadInput, match="holds no ratios to compare with"):
        performance.read_ratios(page)
    page.with_suffix(".json").write_text('{"disk: a": {"median": 2, "lower": 1, "upper": 3}}')
    section = Section("resident", [Table("title", ("what",), [("this",)], "a note", {"b": ratio})])
    performance.write(page, [section], "told")
    assert performance.read_ratios(page) == {"disk: a": Ratio(2, 1, 3), "resident: b": ratio}
    with pytest.raises(BadInput, match="has no place for link"):
        performance.write(page, [Section("link", [])], "told")


def test_a_folder_without_a_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--model", tmp_path)
    assert ended.value.code == 2
    assert "holds no config.json" in capsys.readouterr().err


def test_without_committed_ratios_there_is_nothing_to_check(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        run(monkeypatch, "--model", checkpoint("olmoe"), "--check", "--page", tmp_path / "no.md")
        == 3
    )
    assert "holds no ratios to compare with" in capsys.readouterr().err
