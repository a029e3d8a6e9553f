"""Every preset of the table decides every step of the trace, and is timed at each."""

import pytest

from tools.bench_controller import LOSSLESS, TUNED, controller, foreseeing, timed


@pytest.mark.parametrize("name", ["on-demand", "fmoe", "foresight", TUNED])
def test_every_step_is_timed(name: str) -> None:
    trace = foreseeing(3)
    owner = controller(name, trace)
    assert len(timed(trace, owner)) == len(trace) == 48
    totals = owner.counters.totals()
    assert totals["requests"] == 48 * 8 and (totals["prefetches"] > 0) == (name != "on-demand")


def test_the_presets_are_those_that_lose_nothing() -> None:
    trace = foreseeing(2)
    for name in LOSSLESS:
        owner = controller(name, trace)
        timed(trace, owner)
        totals = owner.counters.totals()
        assert totals["replaced_ranks"] == totals["dropped_ranks"] == totals["low"] == 0
