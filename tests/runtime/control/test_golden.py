"""Exact counts of every policy on a small trace of the bundled model. `python -m tools.make.golden`
rewrites them."""

import json

import pytest

from tools.make.golden import COUNTERS, GOLDEN, SLOTS, count, every_row

ROWS = json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", every_row())
def test_counts_are_the_golden_ones(row: str) -> None:
    assert row in ROWS, (
        f"no golden row: check the policy, then run `python -m tools.make.golden {row}`"
    )
    assert count(row) == ROWS[row]


@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith("eviction/")])
def test_evictions_are_within_what_is_possible(row: str) -> None:
    """More slots give more hits with the policies for which that is a law; no policy beats Belady
    where a step fits."""
    hits = {
        scope: [counts[COUNTERS.index("hits")] for counts in ROWS[row][scope]]
        for scope in ROWS[row]
    }
    best = ROWS["eviction/belady"]
    for scope, by_budget in hits.items():
        for slots, found, bound in zip(SLOTS, by_budget, best[scope], strict=True):
            assert found <= bound[COUNTERS.index("hits")], (scope, slots)
    if row in ("eviction/lru", "eviction/belady"):
        assert all(by_budget == sorted(by_budget) for by_budget in hits.values()), (
            "a stack algorithm lost hits"
        )
