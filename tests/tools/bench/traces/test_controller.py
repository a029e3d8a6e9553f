"""Every preset of the table decides every step of the trace, and is timed at each."""

import pytest

from tools.bench.traces.controller import LOSSLESS, TUNED, controller, foreseeing, timed


@pytest.mark.parametrize("name", ["on-demand", "fmoe", "foresight", TUNED])
def test_every_step_is_timed(name: str) -> None:
    trace = foreseeing(3)
    owner, matching = controller(name, trace)
    found = timed(trace, owner, matching)
    assert len(found.steps_us) == len(trace) == 48
    assert (len(found.openings_us), len(found.searches_us)) == (
        (3, 48) if name == "fmoe" else (0, 0)
    )
    totals = owner.counters.totals()
    assert totals["requests"] == 48 * 8 and (totals["prefetches"] > 0) == (name != "on-demand")


def test_the_presets_are_those_that_lose_nothing() -> None:
    trace = foreseeing(2)
    for name in LOSSLESS:
        owner, matching = controller(name, trace)
        timed(trace, owner, matching)
        totals = owner.counters.totals()
        assert totals["replaced_ranks"] == totals["dropped_ranks"] == totals["low"] == 0
