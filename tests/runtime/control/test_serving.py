"""Steps served with less protection: which keys may be evicted, which wait in the queue, and that
the rest stays."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.control.build import build_controller
from runtime.control.cache import LOADING, RESIDENT
from runtime.control.controller import Controller
from runtime.control.plan import Plan
from runtime.control.serving import Service, controller_kind
from runtime.policies import POLICIES, build
from runtime.policies.base import Artefacts, Step
from runtime.policies.presets import Scope
from runtime.replay.replay import replay
from tests.runtime.policies.contract import PLAIN, Case, built, routed

SHAPE = Shape(num_layers=3, num_experts=6, top_k=2, expert_nbytes=100)
KEEPS = [
    name for name in POLICIES["eviction"] if name != "map"
]  # map goes with the prefetch policy of its name


def controller(serving: str, slots: int, *, window: int = 200, **texts: str) -> Controller:
    policies = build(PLAIN | {"prefetch": "next_gate"} | texts)
    return build_controller(
        policies,
        SHAPE,
        num_slots=slots,
        scope=Scope.GLOBAL,
        window=window,
        artefacts=Artefacts(),
        serving=serving,
    )


def take(owner: Controller, layer: int, selected: list[list[int]], predicted: list[int]) -> Plan:
    """Take one step; `predicted` lists two experts of the next layer, most probable first."""
    ids = np.array(selected, np.int64)
    ahead = np.zeros((len(ids), 1, SHAPE.num_experts), np.float32)
    ahead[:, 0, predicted] = [1, 0.5]
    weights = np.full(ids.shape, 0.5, np.float32)
    plan = owner.step(Step(owner.now.pass_index, 1, layer, ids, weights, predicted=ahead))
    owner.validate()
    return plan


def held(owner: Controller) -> list[int]:
    return np.flatnonzero(owner.cache.state == RESIDENT).tolist()


@pytest.mark.parametrize(("serving", "kept"), [("pinned", 8), ("unprotected", 9)])
def test_a_proposed_resident_is_evicted_for_another_unless_it_is_protected(
    serving: str, kept: int
) -> None:
    owner = controller(serving, 4, window=100)
    owner.begin_pass(1)
    take(owner, 1, [[2, 3]], [0, 1])
    owner.begin_pass(1)
    take(owner, 0, [[0, 1]], [2, 5])  # 8 and 9 are the oldest, 8 is proposed, and 11 needs a slot
    assert held(owner) == [0, 1, kept, 11]


def test_one_by_one_an_expert_is_pinned_only_while_it_is_served() -> None:
    """Both slots are taken by prefetches: the first expert cancels one, the second evicts the
    first."""
    owner = controller("one_by_one", 2)
    owner.begin_pass(1)
    plan = take(owner, 0, [[0, 1]], [4, 0])
    assert [[place.key for place in wave.loads] for wave in plan.waves] == [
        [0],
        [1],
    ] and plan.is_ahead
    assert held(owner) == [1, 10]
    totals = owner.counters.totals()
    assert (
        totals["misses"],
        totals["evictions"],
        totals["prefetches"],
        totals["wasted_bytes"],
    ) == (2, 2, 2, 100)


def test_one_by_one_a_prefetch_may_evict_what_the_step_still_wants() -> None:
    owner = controller("one_by_one", 2, window=100, eviction="lfu")
    for _ in range(2):
        owner.begin_pass(1)
        # brings 6 in the first pass, and 7 in its place in the second
        take(owner, 0, [[0, 0]], [0, 1])
    assert held(owner) == [0, 7]
    # brings 6, which has waited, in the place of 7, and then 7 for 6, once computed
    take(owner, 1, [[0, 1]], [2, 3])
    totals = owner.counters.totals()
    assert (totals["late"], totals["collisions"]) == (1, 1)
    assert held(owner) == [0, 7]


@pytest.mark.parametrize("within", ["ahead", "left"])
def test_one_by_one_least_stale_keeps_what_the_step_still_wants(within: str) -> None:
    """Of what is resident only 0 is of the layer that runs, and it is still to be served when 3
    needs a slot."""
    owner = controller("one_by_one", 3, window=100, eviction=f"least_stale:within={within}")
    for _ in range(2):
        owner.begin_pass(1)
        take(owner, 0, [[0, 0]], [4, 5])  # brings 10 in the first pass, and 11 in the second
    owner.begin_pass(1)
    take(owner, 0, [[3, 0]], [4, 5])
    assert held(owner) == [0, 3, 11]
    assert owner.counters.totals()["collisions"] == 0


def test_one_by_one_what_finds_no_byte_waits_for_the_next_step() -> None:
    owner = controller("one_by_one", 12, window=100)
    owner.begin_pass(1)
    assert [place.key for place in take(owner, 0, [[0, 1]], [4, 5]).prefetches] == [10]
    assert [place.key for place in take(owner, 1, [[2, 3]], [0, 1]).prefetches] == [11], (
        "first come, first served"
    )
    assert [place.key for place in take(owner, 2, [[0, 1]], [2, 3]).prefetches] == [12], (
        "though the step waits for it"
    )
    owner.clear()
    assert [place.key for place in take(owner, 0, [[0, 1]], [2, 3]).prefetches] == [8], (
        "the queue is empty then"
    )


def test_one_by_one_every_token_brings_a_window() -> None:
    owner = controller("one_by_one", 12, window=100)
    owner.begin_pass(2)
    plan = take(owner, 0, [[0, 1], [0, 1]], [4, 5])
    assert [place.key for place in plan.prefetches] == [10, 11]
    assert owner.cache.state[[10, 11]].tolist() == [RESIDENT, RESIDENT]
    assert not (owner.cache.state == LOADING).any()


@given(routed(), st.sampled_from(["lru", "fld", "least_stale"]))
@settings(max_examples=40)
def test_one_by_one_counts_the_same_where_the_step_is_evicted_last_anyhow(
    case: Case, eviction: str
) -> None:
    """Without prefetches, and with a slot for every expert of a step, by policies that evict the
    step's own last."""
    slots = case.num_slots // case.shape.num_layers if case.scope is Scope.LAYER else case.num_slots
    assume(all(len(np.unique(step.experts)) <= slots for step in case.trace.steps()))
    counts = []
    for serving in ("pinned", "one_by_one"):
        owner = built(case, {"eviction": eviction}, serving=serving)
        replay(case.trace, owner)
        counts.append(owner.counters.totals())
    assert counts[0] == counts[1]


@given(
    routed(),
    st.sampled_from([service for service in Service if service != Service.PINNED]),
    st.sampled_from(KEEPS),
    st.sampled_from(
        [
            "none",
            "next_gate",
            "next_gate:distance=2,overfetch=2",
            "score",
            "frequency:distance=3",
            "oracle",
        ]
    ),
)
@settings(max_examples=60)
def test_any_policies_leave_a_sound_state(
    case: Case, serving: str, eviction: str, prefetch: str
) -> None:
    owner = built(case, {"eviction": eviction, "prefetch": prefetch}, serving=serving)
    replay(case.trace, owner)
    owner.validate()
    totals = owner.counters.totals()
    assert totals["demand_bytes"] == totals["misses"] * case.shape.expert_nbytes
    assert totals["requests"] == sum(len(np.unique(step.experts)) for step in case.trace.steps())


@pytest.mark.parametrize(
    ("serving", "texts", "says"),
    [
        ("pined", {}, "--serving is pinned, unprotected, one_by_one, not 'pined'"),
        ("one_by_one", {"miss": "near"}, "leave out --miss near"),
        ("one_by_one", {"residency": "split"}, "leave out --residency split"),
        ("one_by_one", {"residency": "hot"}, "leave out --residency hot"),
    ],
)
def test_what_cannot_be_served_so(serving: str, texts: dict[str, str], says: str) -> None:
    with pytest.raises(BadUsage, match=says):
        controller_kind(serving, build(PLAIN | texts))
