"""The controller's decisions: against a slow reference, and rule by rule for prefetches and
misses."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.routing.expert_maps import ExpertMaps
from artifacts.shape import Shape
from artifacts.traces.next_use import NextUse
from artifacts.traces.trace import Trace
from runtime.control.build import build_controller
from runtime.control.cache import LOADING, RESIDENT
from runtime.control.controller import Controller
from runtime.control.counters import Counter
from runtime.control.ordering import first_of
from runtime.control.plan import Plan
from runtime.policies import POLICIES, build, parse
from runtime.policies.base import Artefacts, Step
from runtime.policies.presets import Scope
from runtime.policies.step import Opening
from runtime.replay.replay import replay
from tests.runtime.control.reference import SlowCache
from tests.runtime.policies.contract import Case, built, keep_the_contract, routed, run

SHAPE = Shape(num_layers=3, num_experts=6, top_k=2, expert_nbytes=100)


def controller(
    slots: int,
    scope: str = "layer",
    window: int = 200,
    shape: Shape = SHAPE,
    future: list[list[np.ndarray]] | None = None,
    maps: ExpertMaps | None = None,
    **texts: str,
) -> Controller:
    """Build a controller. `future`: passes of one [T, K] array a layer, for policies that read the
    future. `maps`: by default none yet."""
    defaults = {
        "routing": "standard",
        "prefetch": "none",
        "eviction": "lru",
        "miss": "fetch",
        "residency": "uniform",
    }
    artefacts = Artefacts(
        buddies=np.tile(np.arange(shape.num_experts), (shape.num_layers, shape.num_experts, 1)),
        buddy_q=np.full((shape.num_layers, shape.num_experts, shape.num_experts), 0.1),
        entropy=np.zeros((shape.num_layers, 101)),
        next_use=None if future is None else NextUse.of(_trace(future), shape),
        maps=maps
        or ExpertMaps(
            1, num_layers=shape.num_layers, num_experts=shape.num_experts, hidden=1, distance=1
        ),
    )
    policies = build(defaults | texts)
    return build_controller(
        policies, shape, num_slots=slots, scope=Scope(scope), window=window, artefacts=artefacts
    )


def _trace(passes: list[list[np.ndarray]]) -> Trace:
    steps = [
        (number, layer, ids)
        for number, layers in enumerate(passes)
        for layer, ids in enumerate(layers)
    ]
    pass_, layer = (
        np.concatenate([np.full(len(s[2]), s[i], np.int32) for s in steps]) for i in (0, 1)
    )
    experts = np.concatenate([ids for _, _, ids in steps]).astype(np.uint16)
    same = np.zeros(len(layer), np.int32)
    return Trace(
        same, pass_, same.astype(np.uint8), layer, same, experts, np.ones(experts.shape, np.float32)
    )


def take(
    owner: Controller, layer: int, selected: list[list[int]], predicted: list[int] | None = None
) -> Plan:
    """Take one step; `predicted` lists the experts of the next layer, most probable first."""
    ids = np.array(selected, np.int64)
    ahead = None
    if predicted is not None:
        ahead = np.zeros((len(ids), 1, SHAPE.num_experts), np.float32)
        ahead[:, 0, predicted] = np.linspace(1, 0.5, len(predicted))
    weights = np.full(ids.shape, 1 / ids.shape[1], np.float32)
    plan = owner.step(Step(owner.now.pass_index, 1, layer, ids, weights, predicted=ahead))
    owner.cache.validate()
    assert not owner.cache.pinned.any(), "pins outlive their step"
    return plan


@st.composite
def traces(draw: st.DrawFn) -> tuple[Shape, int, list[list[np.ndarray]]]:
    """Draw a shape, at least one slot a layer, and passes of one [T, K] array a layer."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_experts = draw(st.integers(2, 9))
    num_layers = draw(st.integers(1, 4))
    top_k = draw(st.integers(1, min(3, num_experts)))
    shape = Shape(num_layers, num_experts, top_k, 10)
    num_tokens = [draw(st.sampled_from([1, 1, 1, 5])) for _ in range(draw(st.integers(1, 8)))]
    passes = [
        [
            np.stack([rng.permutation(num_experts)[:top_k] for _ in range(t)])
            for _ in range(num_layers)
        ]
        for t in num_tokens
    ]
    return shape, draw(st.integers(1, num_experts)) * num_layers, passes


@pytest.mark.parametrize(
    "policy",
    ["lru", "lfu", "lcp", "least_stale", "least_stale:within=left", "least_stale:within=ascending"]
    + ["fld", "fld:distance=absolute", "belady"],
)
@pytest.mark.parametrize("scope", ["layer", "global"])
@given(traces())
@settings(max_examples=40)
def test_counts_equal_the_slow_reference(scope: str, policy: str, trace: tuple) -> None:
    shape, slots, passes = trace
    fast = controller(slots, scope, shape=shape, future=passes, eviction=policy)
    slow = SlowCache(shape, slots, scope == "global", policy)
    slow.future = [
        {(layer, int(e)) for e in ids.ravel()}
        for layers in passes
        for layer, ids in enumerate(layers)
    ]
    for layers in passes:
        fast.begin_pass(len(layers[0]))
        slow.begin_pass(len(layers[0]))
        for layer, selected in enumerate(layers):
            take(fast, layer, selected.tolist())
            slow.step(layer, selected)
    totals = fast.counters.totals()
    assert {name: totals[name] for name in slow.counts} == slow.counts
    assert totals["demand_bytes"] == totals["misses"] * shape.expert_nbytes
    held = {
        divmod(int(key), shape.num_experts) for key in np.flatnonzero(fast.cache.state == RESIDENT)
    }
    assert held == slow.resident


EVERY = [(axis, name) for axis, table in POLICIES.items() for name in table]
MORE = [  # parameters that change what a policy does, not only how much of it
    ("routing", "cache_aware:strength=3,keep=1,renormalise=yes"),
    ("prefetch", "next_gate:distance=2,overfetch=2"),
    ("prefetch", "frequency:distance=3,overfetch=2"),
    ("prefetch", "oracle:distance=6"),
    ("eviction", "lru:stamp=load"),
    ("eviction", "least_stale:within=left"),
    ("prefetch", "map:distance=3,lag=1"),
    ("prefetch", "blend:distance=1,floor=0.1,maps=yes"),
    ("eviction", "map:distance=3"),
    ("eviction", "map:over=all"),
    ("eviction", "least_stale:within=ascending"),
    ("miss", "drop:rank=0,renormalise=yes"),
    ("miss", "buddy:eta=1,rho=1,otherwise=drop"),
    ("miss", "buddy:stand_in=random_resident,quota=0.3"),
    ("miss", "buddy:stand_in=zero,otherwise=drop,renormalise=yes"),
    ("miss", "buddy:metric=coactivation,rho=2,over=token,keep=1,temperature=0.8"),
    ("miss", "zero:fill=no,renormalise=yes"),
    ("miss", "random_resident:fill=no"),
    ("miss", "best_resident:fill=no"),
    ("miss", "substitute:rank=0,tolerance=9"),
    ("residency", "split:theta=0.1,passing=1"),
    ("residency", "split:theta=1"),
]


@pytest.mark.parametrize(("axis", "text"), EVERY + MORE)
@given(routed(), st.data())
@settings(max_examples=25)
def test_every_policy_keeps_the_contract(
    axis: str, text: str, case: Case, data: st.DataObject
) -> None:
    """Each policy in turn, with the other axes drawn from the table, so that each policy is drawn
    in the turns of others too."""
    others = {
        other: data.draw(st.sampled_from(list(table)), other) for other, table in POLICIES.items()
    }
    keep_the_contract(case, **others | {axis: text})


@pytest.mark.parametrize("text", ["next_gate:distance=2,through=yes", "learned", "score", "oracle"])
@given(routed(), st.sampled_from(["fetch", "near:ratio=0.5", "shadow"]))
@settings(max_examples=25)
def test_a_policy_that_remembers_nothing_need_not_be_asked_at_every_step(
    text: str, case: Case, miss: str
) -> None:
    """Asked also where nothing can be sent, it changes nothing."""
    texts = {"prefetch": text, "miss": miss}
    kind = type(parse("prefetch", text))
    assert not kind.follows_steps
    found = run(case, **texts).counters.passes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "follows_steps", True)
        assert np.array_equal(found, run(case, **texts).counters.passes)


@given(
    routed(),
    st.sampled_from(list(POLICIES["eviction"])),
    st.sampled_from(["uniform", "split:theta=0.5"]),
    st.data(),
)
@settings(max_examples=50)
def test_a_step_that_settles_is_planned_as_any_other(
    case: Case, eviction: str, residency: str, data: st.DataObject
) -> None:
    """Without a prefetch policy, a step that finds everything resident takes a shorter way to the
    same plan."""
    miss = data.draw(st.sampled_from(["fetch", "near", "drop"]))
    plans = []
    for settles in (True, False):
        owner = built(case, {"eviction": eviction, "residency": residency, "miss": miss})
        owner._can_settle &= settles
        plans.append([])
        replay(
            case.trace,
            owner,
            watch=lambda step, plan: plans[-1].append((plan.waves, plan.near, plan.prefetches)),
        )
        owner.validate()
    assert plans[0] == plans[1]


@pytest.mark.parametrize("eviction", POLICIES["eviction"])
@pytest.mark.parametrize("scope", list(Scope))
@given(routed())
@settings(max_examples=40)
def test_nothing_beats_belady(scope: Scope, eviction: str, case: Case) -> None:
    """On hits, with the same pins: demand loads only, in passes whose steps fit their scope at
    once."""
    widest = max(len(np.unique(step.experts)) for step in case.trace.steps())
    num_scopes = 1 if scope is Scope.GLOBAL else case.shape.num_layers
    case = replace(case, scope=scope, num_slots=max(case.num_slots, widest * num_scopes))
    best = run(case, eviction="belady").counters.totals()["hits"]
    assert best >= run(case, eviction=eviction).counters.totals()["hits"]


@pytest.mark.parametrize("eviction", sorted(set(POLICIES["eviction"]) - {"random", "belady"}))
def test_equals_go_by_the_lower_key(eviction: str) -> None:
    """Keys that a policy ranks alike are evicted in ascending order."""
    owner = controller(6, "global", eviction=eviction)
    owner.begin_pass(1)
    keys = np.arange(SHAPE.num_experts)
    order = np.lexsort(owner._eviction.order(keys, owner.now)[::-1])
    assert order.tolist() == keys.tolist()


def test_a_prefetch_that_fits_the_window_is_a_hit() -> None:
    owner = controller(18, prefetch="next_gate", window=200)
    owner.begin_pass(1)
    assert [place.key for place in take(owner, 0, [[0, 1]], [4, 5]).prefetches] == [10, 11]
    plan = take(owner, 1, [[4, 5]], [0, 1])
    assert [place.key for place in plan.waves[0].resident] == [10, 11]
    totals = owner.counters.totals()
    assert (totals["hits"], totals["late"], totals["prefetches"]) == (2, 0, 4)


def test_a_prefetch_beyond_the_window_is_late_and_the_rest_is_not_issued() -> None:
    owner = controller(18, prefetch="next_gate", window=150)
    owner.begin_pass(1)
    take(owner, 0, [[0, 1]], [4, 5])  # 200 bytes sent for, 150 moved
    assert owner.cache.layer_states(1)[[4, 5]].tolist() == [RESIDENT, LOADING]
    plan = take(owner, 1, [[5, 0]], [0, 1])
    assert [place.key for place in plan.waves[0].resident] == [11]
    totals = owner.counters.totals()
    assert (totals["late"], totals["misses"], totals["demand_bytes"]) == (1, 3, 300)


def test_an_unused_prefetch_that_leaves_is_wasted() -> None:
    owner = controller(3, prefetch="next_gate", window=100)
    owner.begin_pass(1)
    take(owner, 0, [[0, 0]], [4])
    take(owner, 1, [[2, 2]], [1])
    assert owner.counters.totals()["wasted_bytes"] == 100


def test_what_is_proposed_and_resident_is_not_evicted_for_what_is_not() -> None:
    owner = controller(6, prefetch="next_gate", window=200)
    owner.begin_pass(1)
    take(owner, 0, [[0, 1]], [2, 3])
    take(owner, 1, [[2, 3]], [0, 1])
    take(owner, 2, [[0, 1]], [0, 1])
    owner.begin_pass(1)
    # takes the slot of 3, not of 2
    assert take(owner, 0, [[0, 1]], [2, 5]).prefetches[0].key == 6 + 5
    assert owner.cache.layer_states(1)[[2, 5]].tolist() == [RESIDENT, RESIDENT]


def test_least_stale_keeps_what_is_proposed_again_also_where_nothing_can_be_sent() -> None:
    owner = controller(6, "global", window=50, prefetch="next_gate", eviction="least_stale")
    owner.begin_pass(1)
    take(owner, 0, [[0, 1]], [2, 3])
    take(owner, 1, [[2, 3]], [0, 1])
    take(owner, 2, [[0, 1]], [5, 0])  # 5 is sent for, for the next pass, and half of it has moved
    owner.begin_pass(1)
    assert not take(owner, 0, [[0, 0]], [3, 2]).prefetches, "the link has no byte left"
    # takes the slot of 12, which nothing has proposed yet; now 12 is sent for, for 5
    take(owner, 1, [[2, 4]], [0, 1])
    assert np.flatnonzero(owner.cache.state == RESIDENT).tolist() == [0, 8, 9, 10, 13]


def test_a_prefill_larger_than_the_tier_runs_in_waves() -> None:
    owner = controller(6)
    owner.begin_pass(1)
    take(owner, 0, [[5, 4]])
    plan = take(owner, 0, [[0, 1], [2, 3], [4, 5]])
    assert [[place.key for place in wave.resident] for wave in plan.waves] == [[4, 5], [], []]
    assert [[place.key for place in wave.loads] for wave in plan.waves] == [[], [0, 1], [2, 3]]


def test_near_fills_empty_slots_then_computes_where_experts_lie() -> None:
    owner = controller(6, miss="near")
    owner.begin_pass(1)
    assert [place.key for place in take(owner, 0, [[0, 1], [2, 3]]).near] == [2, 3]
    assert [place.key for place in take(owner, 0, [[4, 0]]).near] == [4]
    assert controller(6, miss="near:fill=no").cache.room(0) == 2
    totals = owner.counters.totals()
    assert (totals["fetched"], totals["near"], totals["evictions"]) == (2, 3, 0)


def test_prefetches_use_the_link_while_near_experts_are_computed() -> None:
    owner = controller(6, prefetch="next_gate", miss="near:ratio=1.0,fill=no", window=100)
    owner.begin_pass(1)
    # Two experts are near: prefetches have the bytes of two experts, and the window's one.
    assert len(take(owner, 0, [[0, 1]], [4, 5]).prefetches) == 2
    assert owner.cache.layer_states(1)[[4, 5]].tolist() == [RESIDENT, RESIDENT]
    assert len(take(owner, 1, [[4, 5]], [0, 1]).prefetches) == 1  # none is near


def test_drop_leaves_out_the_weaker_ranks_and_may_keep_the_sum() -> None:
    owner = controller(6, miss="drop:rank=1,renormalise=yes")
    owner.begin_pass(1)
    plan = take(owner, 0, [[0, 1]])
    assert plan.selected.tolist() == [[0, -1]]
    assert plan.weights.tolist() == [[1.0, 0.0]]
    totals = owner.counters.totals()
    assert (totals["fetched"], totals["spared"], totals["dropped_ranks"]) == (1, 1, 1)


def test_a_stand_in_is_computed_and_the_missing_counts_as_spared() -> None:
    owner = controller(9, miss="buddy:beta=1.1")
    owner.begin_pass(1)
    take(owner, 0, [[0, 1]])
    plan = take(owner, 0, [[0, 5]])
    assert plan.selected.tolist() == [[0, 1]]
    totals = owner.counters.totals()
    assert (totals["spared"], totals["replaced_ranks"]) == (1, 1)
    assert [place.key for place in plan.waves[0].resident] == [0, 1]


def test_collisions_are_misses_on_what_left_in_this_pass() -> None:
    owner = controller(1, "global")
    owner.begin_pass(1)
    take(owner, 0, [[0, 1]])
    take(owner, 0, [[0, 0]])
    owner.begin_pass(1)
    take(owner, 0, [[1, 1]])
    assert [int(table[Counter.COLLISIONS].sum()) for table in owner.counters.passes] == [1, 0]


def test_before_a_pass_its_first_layers_come_within_the_bytes_of_a_step() -> None:
    """A stored map names experts 4 and 5 of layer 0, and the link moves one and a half; the second
    is late."""
    said = np.full((1, 3, 6), 0.05)
    said[0, 0, [4, 5]] = 0.4
    maps = ExpertMaps(1, num_layers=3, num_experts=6, hidden=1, distance=1)
    maps.add(np.ones((1, 1)), said)
    owner = controller(6, window=150, prefetch="map", maps=maps)
    owner.begin_pass(1)
    brought = owner.open_pass(opening := Opening(0, 1, np.ones((1, 1), np.float32)))
    assert [place.key for place in brought] == [4, 5]
    assert [owner.cache.states[key] for key in (4, 5)] == [
        RESIDENT,
        LOADING,
    ] and not owner.cache.pinned.any()
    assert owner.now.step == -1, "it is no step"
    ids = np.array([[4, 5]])
    weights = np.ones((1, 2), np.float32)
    p = said[0, :1].astype(np.float32)
    owner.step(
        Step(0, 1, 0, ids, weights, p, last=np.zeros(1, np.int64), embedding=opening.embedding)
    )
    of_layers = owner.counters.by_layer()
    assert [layer["prefetches"] for layer in of_layers] == [4, 0, 0], (
        "two before the pass, two of layer 1 by layer 0"
    )
    assert (of_layers[0]["hits"], of_layers[0]["late"], of_layers[0]["misses"]) == (1, 1, 0)
    owner.validate()


@pytest.mark.parametrize("prefetch", ["next_gate", "map:semantic=no", "blend"])
def test_without_the_embedding_nothing_comes_before_a_pass(prefetch: str) -> None:
    assert not parse("prefetch", prefetch).opens_passes


def test_forgetting_empties_the_cache_and_keeps_the_counts() -> None:
    owner = controller(6, prefetch="next_gate", window=50)
    owner.begin_pass(1)
    take(owner, 0, [[0, 1]], [4, 5])
    owner.clear()
    owner.cache.validate()
    assert owner.cache.room(0) == 2 and owner.counters.totals()["misses"] == 2
    take(owner, 1, [[4, 5]], [0, 1])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(1, 12), st.booleans())
def test_what_leaves_first_is_sorted_stably(column: list[int], count: int, is_double: bool) -> None:
    """The values contain the largest number there is, which marks the places already found."""
    keys = np.arange(100, 100 + len(column))
    values = np.array(column, np.float64)
    values[values == 4] = np.inf
    order = (values, -values) if is_double else (values,)
    assert first_of(keys, order, count) == keys[np.argsort(values, kind="stable")][:count].tolist()


def test_a_replay_shows_predictions_only_to_policies_that_read_them() -> None:
    assert controller(6).num_predicted == 0
    assert controller(6, prefetch="next_gate:distance=2").num_predicted == 2
    assert controller(6, prefetch="frequency:distance=2").num_predicted == 0
