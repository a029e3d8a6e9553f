"""Reproductions: figures of papers beside ours, unavailable ones marked, disagreements reported."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from artifacts.hardware.machines import machine
from artifacts.traces.parquet import read_parquet, write_parquet
from artifacts.traces.statistics import measure
from artifacts.traces.synthetic import generate
from moectl.cli import main
from moectl.commands import reproduce
from moectl.reproductions import contextaware, fmoe, moepic, moepicsystem
from moectl.reproductions.report import DOES_NOT_FOLLOW, NOT_TESTABLE, UNKNOWN
from tests import TRACE


@pytest.fixture(autouse=True, scope="module")
def once() -> Iterator[None]:
    """Compute once what two tests show in two ways."""
    with pytest.MonkeyPatch.context() as patched:
        each = {name: cache(work) for name, work in reproduce.REPRODUCTIONS.items()}
        patched.setattr(reproduce, "REPRODUCTIONS", each)
        yield


def reproduced(name: str, capfd: pytest.CaptureFixture[str]) -> dict:
    """The reproduction as JSON; it also runs without --json, as the documents show it."""
    assert main(["simulate", "--reproduce", name]) == 0
    shown = capfd.readouterr().out
    assert "verdict" in shown and "assumed: " in shown
    assert main(["simulate", "--reproduce", name, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_moepic_predicts_lcp_from_lru_and_lfu(capfd: pytest.CaptureFixture[str]) -> None:
    said = reproduced("moepic-table1", capfd)
    rows = {(row["policy"], row["experts_held"]): row for row in said["hit_rates"]}
    assert len(rows) == 25
    for policy in moepic.FITTED:
        assert abs(rows[policy, 30]["difference"]) < 0.006, "the stored dials no longer fit: run fit-trace again"
        assert rows[policy, 30]["ours_is"] == "fitted"
        assert rows[policy, 20]["paper"] == UNKNOWN and rows[policy, 20]["ours_is"] == "predicted"
    assert said["available"].startswith("4 of the 20 figures that its tables ask for, and 4 statements")
    assert rows["lcp", 30]["ours_is"] == "predicted" and rows["lcp", 30]["paper"] == 0.6221
    for held in moepic.HELD:
        assert rows["belady", held]["ours"] > max(rows[policy, held]["ours"] for policy in moepic.PAPER)
    assert {claim["verdict"] for claim in said["claims"]} <= {"agrees", "DISAGREES"}


def test_moepic_says_where_a_cut_pays_and_where_not(capfd: pytest.CaptureFixture[str]) -> None:
    said = reproduced("moepic", capfd)
    assert said["available"].startswith("0 of the 26 figures that its tables ask for, and 10 statements")
    least = {(row["shape"], row["link_gb_s"]): row["least_at"] for row in said["ratio"]}
    assert least["qwen1.5-moe-a2.7b", 25.0] == 1, "too short a window"
    assert min(moepicsystem.THETAS) <= least["mixtral-8x7b", 400.0] < 1 and least["qwen1.5-moe-a2.7b", 400.0] < 1
    lossless = [row for row in said["rivals"] if "lossy" not in row["rival"]]
    ahead = [row for row in lossless if row["lower_by"] > 0]
    assert [(row["shape"], row["budget"], row["rival"]) for row in lossless if row not in ahead] == [
        ("mixtral-8x7b", "25%", "mixtral-offloading")  # two slots a layer, each refilled as soon as it is free
    ]
    for row in said["parts"]:
        assert row["as_it_is"] <= 1.001 * row["all_alike_uncut"] < row["all_alike_cut_in_half"]
    verdicts = {claim["claim"]: claim["verdict"] for claim in said["claims"]}
    assert verdicts["TPOT below every rival that alters nothing"] == "DISAGREES"
    assert verdicts["lower by as much as in the paper"] == "DISAGREES"
    assert any("launches and host work" in line for line in said["assumed"])


def test_specmd_says_where_it_disagrees(capfd: pytest.CaptureFixture[str]) -> None:
    said = reproduced("specmd", capfd)
    assert len(said["collisions"]) == 12 and all(row["paper"] == UNKNOWN for row in said["collisions"])
    assert len(said["drop_in"]) == 6
    assert said["available"].startswith("0 of the 18 figures")
    assert [claim["paper"] for claim in said["claims"]] == ["yes", "up to 85", "above 0.88", "yes"]
    assert any("synthetic" in line for line in said["assumed"])


def test_buddymoe_in_ratio(capfd: pytest.CaptureFixture[str]) -> None:
    said = reproduced("buddymoe", capfd)
    assert [row["share_on_the_gpu"] for row in said["throughput"]] == [0.75, 0.5, 0.375]
    assert [row["paper"] for row in said["throughput"]] == [1.074, UNKNOWN, 1.103]
    for row in said["throughput"]:
        assert row["ours"] == pytest.approx(row["with_buddies"] / row["tokens_s_on_demand"])
    assert said["available"].startswith("2 of the 3 figures")
    assert {claim["claim"]: claim["verdict"] for claim in said["claims"]}["buddies are faster"] == "agrees"
    assert [claim["verdict"] for claim in said["claims"] if "0.5 " in claim["claim"]] == ["cannot be said"]


def test_context_aware_says_where_it_disagrees_and_why(capfd: pytest.CaptureFixture[str]) -> None:
    said = reproduced("context-aware", capfd)
    assert [row["paper"] for row in said["ranges"]] == ["6.6 to 8.7", "about 5", "7.9 to 11.5", "about 8"]
    assert len(said["settings"]) == 12 and all(row["paper"] == UNKNOWN for row in said["settings"])
    assert said["available"].startswith("4 of the 20 figures")
    for row in said["settings"]:
        assert 1 < row["end_to_end"] < row["ndp_side"] < 4, "arithmetic bounds the NDP at few bits"
        assert row["ndp_side"] < row["ndp_side_by_memory_alone"] < (5.1 if row["average_bits"] == 3 else 7.5)
    alone = {row["requests_at_a_time"]: row["ndp_side"] for row in said["batches"]}
    assert 1 < alone[16] < alone[4], "many tokens an expert leave bits little to gain"
    verdicts = {claim["claim"]: claim["verdict"] for claim in said["claims"]}
    assert verdicts["end to end, 3 bits"] == verdicts["2 bits are faster than 3"] == "DISAGREES"
    assert verdicts["one cold expert, by memory alone, 2 bits"] == "agrees"
    assert any("16 multiply-adds a cycle" in line for line in said["assumed"])
    assert any(line.startswith("arithmetic bounds the NDP") and "no width gains" in line for line in said["assumed"])


def test_context_aware_has_the_similarity_of_the_paper() -> None:
    trace = generate(contextaware.DIALS, contextaware.layers_of("mixtral-8x7b").shape, detailed=False)
    assert measure(trace, 8).similarity == pytest.approx(0.89, abs=0.01)


def test_a_cold_expert_gains_what_memory_and_arithmetic_let_it() -> None:
    assert contextaware.cold_expert(machine("h100-cxl-ndp"), 2) == pytest.approx(4)
    assert contextaware.cold_expert(machine("a100-pcie4"), 2) == pytest.approx(16 / 2.14, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("moepi",), "unknown reproduction 'moepi'; did you mean moepic?"),
        (("specmd", "--model", "olmoe-1b-7b"), "brings its own trace, model and machine"),
    ],
)
def test_what_is_no_reproduction(options: tuple[str, ...], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--reproduce", *options]) == 2
    assert says in capfd.readouterr().err


def test_tables_for_a_person(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--reproduce", "buddymoe"]) == 0
    shown = capfd.readouterr().out
    assert all(text in shown for text in ("not available here", "DISAGREES", "assumed: ", "verdict"))


def test_fmoe_on_a_trace_of_ones_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, recorded = tmp_path / "trace.parquet", read_parquet(TRACE)
    write_parquet(recorded.take(recorded.token < 36), path)
    assert main(["simulate", "--reproduce", "fmoe", "--trace", str(path), "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    rates = {row["policies"]: row["one_cache"] for row in said["systems"]}
    assert list(rates) == [*fmoe.SYSTEMS, "fmoe, not learning", "oracle"]
    assert max(rates, key=rates.get) == "oracle" and min(rates, key=rates.get) == "on-demand"
    patterns = {row["by"]: row["hit_rate"] for row in said["patterns"]}
    assert list(patterns)[: len(fmoe.PATTERNS)] == list(fmoe.PATTERNS)
    assert patterns["map T"] < patterns["map T+S"], "nothing else guides the first layers"
    assert [row["d"] for row in said["distances"]] == [1, 2, 3, 4, 5, 6]
    coarse, fine = (row["entropy"] for row in said["entropy"][1:])
    assert fine < coarse < 1
    assert said["assumed"][0].startswith(f"{path}: each quarter of its 6 requests is replayed")
    gains = {(row["against"], row["fmoe_has"]): row for row in said["gains"]}
    assert gains["Mixtral-Offloading", "hit rate higher by"]["paper"] == 0.11
    assert {row["ours"] is None for (against, _), row in gains.items() if against == "ProMoE"} == {True}
    ours = rates["fmoe"] / rates["mixtral-offloading"] - 1
    assert gains["Mixtral-Offloading", "hit rate higher by"]["ours"] == pytest.approx(ours)
    assert len(said["small"]) == 4 and said["available"].startswith("16 of the ")
    verdicts = {claim["claim"]: claim["verdict"] for claim in said["claims"]}
    assert verdicts["Figure 9: better than ProMoE"] == NOT_TESTABLE
    assert verdicts["Figure 16: 32,000 maps in less than 200 MB"] == DOES_NOT_FOLLOW
    for claim in said["claims"]:
        assert "within a factor" not in claim["claim"] or re.fullmatch(r"\d of [39]", claim["ours"])
        if ends := re.fullmatch(r".* % \((.+) % to (.+) %\)", claim["ours"]):
            low, high = map(float, ends.groups())
            said_so = {"agrees": low >= 0, "DISAGREES": high <= 0, "cannot be said": low <= 0 <= high}
            assert said_so[claim["verdict"]], claim


def test_fmoe_refuses_traces_that_tell_too_little(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace = read_parquet(TRACE)
    write_parquet(replace(trace, iteration=None, embeddings=None), tmp_path / "old.parquet")
    write_parquet(trace.take(trace.request == 0), tmp_path / "one.parquet")
    for name, says in (("old", "record it with `moectl run --prefetch next_gate"), ("one", "has one request")):
        assert main(["simulate", "--reproduce", "fmoe", "--trace", str(tmp_path / f"{name}.parquet")]) == 3
        assert says in capfd.readouterr().err
