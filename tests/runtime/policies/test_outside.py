"""A policy of another package, as docs/architecture.md shows it: listed, run live, simulated and
benched without a change of this tree."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from artifacts.errors import BadUsage
from moectl.cli import main
from moectl.cli.completion import policies as completed
from runtime.policies import POLICIES, find, register_policy
from runtime.policies.eviction.lru import Lru
from runtime.policies.presets import preset
from runtime.replay.settings import Setting
from runtime.session.settings import Settings
from tests.helpers import outside

pytestmark = pytest.mark.slow


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Path]:
    """The page's file and entry point, installed in a folder of its own."""
    known = dict(POLICIES["eviction"])
    with outside.package(tmp_path, "lru_k", *outside.shown("architecture.md")):
        yield tmp_path
    POLICIES["eviction"].clear()
    POLICIES["eviction"].update(known)


def said(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_it_is_listed_and_completed(package: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "lru_k" in completed("eviction")() and "lru_k" not in POLICIES["eviction"]
    rows = said(capfd, "inspect", "policies")["rows"]
    [row] = [row for row in rows if row["policy"] == "lru_k"]
    assert row["axis"] == "eviction" and row["what_it_does"].startswith("LRU-K: the key whose k-th")


def test_it_runs_live_simulated_and_in_benches(
    package: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With `k=1` it decides as lru, with `k=2` otherwise."""
    run = ("run", "--prompt", "Return", "--greedy", "--max-new-tokens", "8", "--budget", "25%")
    lru, one, two = (
        said(capfd, *run, "--eviction", name) for name in ("lru", "lru_k:k=1", "lru_k")
    )
    assert one["receipt"]["policies"]["eviction"] == "lru_k:k=1"
    hits = [each["counters"]["hits"] for each in (lru, one, two)]
    assert hits[0] == hits[1] != hits[2]

    simulate = ("simulate", "--synthetic", "tokens=320", "--compare")
    lru, one = (said(capfd, *simulate, name)["counters"] for name in ("lru", "lru_k:k=1"))
    assert lru == one

    named = "on-demand,on-demand:eviction=lru_k,k=1"
    small = ("--budgets", "25%", "--tokens", "32", "--length", "16")
    rows = said(capfd, "bench", "--simulate", "--presets", named, *small)["rows"]
    ours = {row["preset"]: row["hit_rate"] for row in rows}
    assert ours["on-demand"] == ours["on-demand:eviction=lru_k,k=1"]


def test_an_object_stands_where_a_name_does(package: Path) -> None:
    lru_k = find("eviction", "lru_k")
    assert Settings(policies={"eviction": lru_k(k=3)}).texts()["eviction"] == "lru_k:k=3"
    assert Setting("one", policies={"eviction": lru_k(k=3)}).build().eviction == lru_k(k=3)


def test_a_class_without_a_name_gets_its_own(package: Path) -> None:
    class Oldest(Lru):
        pass

    assert Settings(policies={"eviction": Oldest()}).texts()["eviction"] == "Oldest"
    assert isinstance(find("eviction", "Oldest")(), Oldest)


def test_an_axis_of_a_preset_is_replaced_and_then_its_parameters() -> None:
    changed = preset("on-demand:eviction=score,decay=0.5")
    assert changed.eviction == "score:decay=0.5"


def test_what_cannot_be_imported_is_told_where_it_is_asked_for(
    package: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (package / "lru_k.py").write_text("import nowhere_at_all\n")
    assert main(["run", "--prompt", "x", "--eviction", "lru_k"]) == 5
    told = capfd.readouterr().err
    assert told.startswith("moectl: the eviction policy lru_k cannot be imported from lru_k:LruK")
    assert told.count("\n") == 1
    assert main(["simulate", "--synthetic", "tokens=320", "--eviction", "lru"]) == 0


@pytest.mark.parametrize(
    "axis, name, policy, told",
    [
        ("evictions", "x", Lru, "unknown axis"),
        ("eviction", "lfu", Lru, "'lfu' cannot be the name"),
        ("eviction", "a-b", Lru, "'a-b' cannot be the name"),
        ("eviction", "plain", int, "int is no dataclass"),
    ],
)
def test_what_is_no_policy_is_refused(axis: str, name: str, policy: type, told: str) -> None:
    with pytest.raises(BadUsage, match=told):
        register_policy(axis, name, policy)
