"""Reproductions: what the papers say beside what we find, what is not known marked, disagreement said."""

import json

import pytest

from moectl.cli import main
from moectl.reproductions import moepic
from moectl.reproductions.report import UNKNOWN


def reproduced(name: str, capfd: pytest.CaptureFixture[str]) -> dict:
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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("moepic",), "unknown reproduction 'moepic'; did you mean moepic-table1?"),
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
