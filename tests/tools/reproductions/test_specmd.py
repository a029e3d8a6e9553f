"""SpecMD: every row of its tables beside ours, and what its own tables rule out."""

import json

import pytest

from moectl.cli import main
from tools.reproductions.report import DOES_NOT_FOLLOW
from tools.reproductions.specmd import figures as paper
from tools.reproductions.specmd import reproduce
from tools.reproductions.specmd.claims import from_its_tables
from tools.reproductions.specmd.reproduce import CASES, DROPPED_IN, LAYER_EXPERTS

pytestmark = pytest.mark.slow


def test_its_figures_stand_beside_ours(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "SEEDS", (0,))
    assert main(["simulate", "--reproduce", "specmd", "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert len(said["collisions"]) == len(LAYER_EXPERTS) * len(CASES)
    held = {
        (row["shape"], row["bits"], row["budget"]): row["experts_held"]
        for row in said["collisions"]
    }
    assert held["olmoe-1b-7b", 4, 5] == 204 and held["olmoe-1b-7b", 16, 5] == 51
    for row in said["collisions"]:
        assert row["score"] > row["least_stale"] or row["budget"] == 1
    printed = {(row["shape"], row["preset"]): row["paper"] for row in said["drop_in"]}
    assert printed == {key: row[2] for key, row in paper.TABLE_2.items() if key[1] in DROPPED_IN}
    verdicts = {claim["claim"]: claim["verdict"] for claim in said["claims"]}
    assert verdicts["lru collides more than Least-Stale, 5 %, experts of 4 bits (5.2)"] == "agrees"
    assert (
        verdicts["lru's collisions over Least-Stale's at 5 %, experts of 4 bits (5.2)"] == "agrees"
    )
    assert (
        verdicts["score collides more than Least-Stale, 5 %, experts of 4 bits (5.2)"]
        == "not told apart"
    ), "random eviction collides less than score as well"
    assert any("synthetic" in line for line in said["assumed"])


def test_what_its_own_tables_decide() -> None:
    verdicts = {claim.text: claim.verdict for claim in from_its_tables()}
    ruled_out = [text for text, verdict in verdicts.items() if verdict == DOES_NOT_FOLLOW]
    assert len(ruled_out) == 4 and {*verdicts.values()} == {"agrees", DOES_NOT_FOLLOW}
    least, _ = paper.RATES["least_stale"]
    assert paper.RATES["lru"][1] / least < paper.FIGURE_8_RATIOS[0], (
        "LRU's rate cannot be ten times Least-Stale's"
    )
    assert min(gain for _, _, gain in paper.TABLE_2.values()) < 0 < paper.SHORTER_5_2[0]
