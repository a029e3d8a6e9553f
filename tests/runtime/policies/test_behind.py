"""The miss policy that computes near now and brings behind, by hand and on drawn traces."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from artifacts.traces.trace import DECODE, PREFILL, Trace
from runtime.control.cache import ABSENT, LOADING
from runtime.control.controller import Controller
from runtime.control.plan import Plan
from runtime.policies import build, describe, parse
from runtime.policies.miss.behind import Behind
from runtime.policies.presets import Scope
from runtime.replay.replay import replay
from tests.runtime.policies.contract import PLAIN, Case, built, routed
from tests.runtime.policies.examples import prepared, residents, step


def behind(options: str = "") -> Behind:
    return prepared("miss", f"behind:ratio=0.5{options}")


def test_it_waits_for_as_many_as_the_link_brings_meanwhile_and_delays_no_later_ones() -> None:
    """Two of six misses take the link as long as four take the near tier."""
    choice = behind().choose(step([[0, 1, 2, 3, 4, 5]]), residents(num_free=6))
    assert choice.near == {2, 3, 4, 5} and choice.behind == ()
    assert choice.lent == 0.0
    there = replace(residents(num_free=6), room=1.9)
    choice = behind().choose(step([[0, 1, 2, 3, 4, 5]]), there)
    assert choice.behind == (2,), "one comes before the next step"


def test_what_the_link_still_moves_goes_before_what_is_waited_for() -> None:
    """With one and a half experts more the same load would end at 1.5 / .5 = 3 beside 2 near."""
    wanted = step([[0, 1]])
    assert behind().choose(wanted, residents()).near == {1}
    choice = behind().choose(wanted, replace(residents(num_free=6), busy=0.5))
    assert choice.near == {0, 1}, "1.5 / .5 beside 2"
    assert choice.behind == (0, 1), "both find an empty slot"
    assert choice.lent == 1.0, "the link moves one expert while two are computed near"


def test_only_what_is_used_more_than_twice_as_often_as_a_resident_is_brought() -> None:
    """Uses have a half-life of one token. At the second one 2 has 1, and resident 1 has .5; at the
    third 1.5 beside .25."""
    policy = behind(",half_life=1")
    there = replace(residents(0, 1), busy=1.0)
    assert policy.choose(step([[0, 1]]), there).behind == ()
    assert policy.choose(step([[2, 0]]), there).behind == ()
    assert policy.choose(step([[2, 0]]), there).behind == (2,)
    strict = behind(",half_life=1,margin=9")
    for _ in range(3):
        assert strict.choose(step([[2, 0]]), replace(residents(0), busy=1.0)).behind == ()


def test_what_is_under_way_is_computed_near_again() -> None:
    there = residents(1, loading=(0,), num_free=1)
    both = step([[0, 1], [2, 0]])
    assert behind().choose(both, there).near == {0}, "2 is waited for as long as both would take"
    choice = behind().choose(both, replace(there, busy=0.5))
    assert choice.near == {0, 2} and choice.behind == (2,)
    alone = behind().choose(step([[0, 1]]), residents(1, loading=(0,)))
    assert alone.near == {0} and alone.behind == () and alone.lent == 0.5


def test_prompts_are_fetched_and_nothing_is_chosen_where_all_is_there() -> None:
    for choice in (
        behind().choose(step([[0, 1], [2, 3]], phase=PREFILL), residents(loading=(1,))),
        behind().choose(step([[0, 1]]), residents(0, 1)),
    ):
        assert not choice.near and not choice.behind and not choice.lent


def test_an_open_ratio_is_the_machine_s_and_a_given_one_stays() -> None:
    policies = build(PLAIN | {"miss": "behind"})
    settled = policies.with_ratio(lambda: 0.25)
    assert describe(settled.miss) == "behind:ratio=0.25" and policies.miss.ratio is None
    assert settled.with_ratio(lambda: 1 / 0) is settled, "nothing is measured"
    assert build(PLAIN).with_ratio(lambda: 1 / 0).miss == parse("miss", "fetch")
    with pytest.raises(AssertionError, match="without a ratio"):
        prepared("miss", "behind").choose(step([[0, 1]]), residents())


@pytest.mark.parametrize("options", ["ratio=0", "tokens=0", "margin=0.5", "half_life=0"])
def test_parameters_out_of_range_are_refused(options: str) -> None:
    with pytest.raises(BadUsage, match="behind needs"):
        parse("miss", f"behind:{options}")


class _Watched:
    """Counts near experts of the plans, and checks that nothing is sent for twice."""

    def __init__(self, owner: Controller) -> None:
        self.owner = owner
        self.num_near = 0

    def run(self, case: Case) -> None:
        owner = self.owner
        self._before = owner.cache.state.copy()
        replay(case.trace, owner, watch=self._see)
        owner.validate()

    def _see(self, _: object, plan: Plan) -> None:
        state = self.owner.cache.state
        loads = [place.key for wave in plan.waves for place in wave.loads]
        brought = [place.key for place in plan.prefetches]
        near = [place.key for place in plan.near]
        assert len({*loads, *brought}) == len(loads) + len(brought), "two loads of one expert"
        assert (self._before[loads + brought] == ABSENT).all(), "it was there, or under way"
        assert {*brought} <= {*near}, "what is brought behind was computed near"
        window = self.owner.mover.arrivals.window // self.owner.shape.expert_nbytes
        assert not loads or len(brought) <= window, "it would delay the next step's loads"
        if len(plan.waves) == 1:
            held = [place.key for place in (*plan.waves[0].resident, *plan.waves[0].loads)]
            assert (state[held] != ABSENT).all(), "a pinned expert left"
        self.num_near += len(near)
        self._before = state.copy()


@given(routed(), st.sampled_from(["lru", "lfu", "horizon"]), st.sampled_from([0.1, 0.5, 2.0]))
@settings(max_examples=60, deadline=None)
def test_no_expert_is_loaded_twice_none_that_is_pinned_leaves_and_counters_add_up(
    case: Case, eviction: str, ratio: float
) -> None:
    texts = {"eviction": eviction, "miss": f"behind:ratio={ratio},margin=1"}
    watched = _Watched(built(case, texts))
    watched.run(case)
    totals = watched.owner.counters.totals()
    nbytes = case.shape.expert_nbytes
    assert totals["near"] + totals["late_elsewhere"] == watched.num_near
    assert totals["misses"] == totals["near"] + totals["fetched"]
    assert totals["prefetch_bytes"] == totals["prefetches"] * nbytes
    assert totals["demand_bytes"] == totals["fetched"] * nbytes
    assert totals["wasted_bytes"] <= totals["prefetch_bytes"]


def test_a_drawn_trace_computes_some_again_while_they_are_under_way() -> None:
    """The counter is not always nought: with one layer and a small window, loads last for tokens."""
    owner = built(_one_layer(), {"miss": "behind:ratio=0.1,half_life=1e9"})
    replay(_one_layer().trace, owner)
    totals = owner.counters.totals()
    assert totals["late"] == totals["late_elsewhere"] > 0
    assert np.flatnonzero(owner.cache.state == LOADING).size


def _one_layer() -> Case:
    """One token after another wants the same two of four experts, and the cache is empty."""
    none = np.zeros(3, np.int32)
    weights = np.full((3, 2), 0.5, np.float32)
    trace = Trace(
        none,
        np.arange(3, dtype=np.int32),
        np.full(3, DECODE, np.uint8),
        none,
        np.arange(3, dtype=np.int32),
        np.array([[0, 1]] * 3, np.uint16),
        weights,
        embeddings=np.zeros((1, 3), np.float32),
    )
    return Case(Shape(1, 4, 2, expert_nbytes=160), trace, 2, Scope.LAYER, window=10)
