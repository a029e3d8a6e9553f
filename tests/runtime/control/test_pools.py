"""Experts dealt out to devices: the slots of each device, and that no expert is ever resident on
another device."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import BadUsage
from artifacts.quantisation.replicas import Replicas
from artifacts.quantisation.widths import WIDTHS
from artifacts.shape import Shape
from runtime.control import sizes as budget
from runtime.control.build import build_controller
from runtime.control.pools import Partitions, Pool, check_each_has_a_slot, whole_experts
from runtime.policies import build, parse
from runtime.policies.base import Artefacts, Residents, Step
from runtime.policies.miss.near import NearMiss
from runtime.policies.presets import Scope
from runtime.policies.shared.misses import beyond_free
from runtime.policies.step import fitting
from tests.runtime.policies.contract import PLAIN, Case, keep_the_contract, routed

SHAPE = Shape(num_layers=3, num_experts=5, top_k=2, expert_nbytes=100)


@given(st.integers(1, 9), st.data())
@settings(max_examples=200)
def test_slots_are_dealt_out_evenly(num_experts: int, data: st.DataObject) -> None:
    partitions = Partitions(num_experts, data.draw(st.integers(1, num_experts)))
    capacities = np.array(data.draw(st.lists(st.integers(0, num_experts), min_size=1, max_size=6)))
    rooms = np.bincount(np.arange(num_experts) % partitions.count)
    dealt = partitions.dealt(capacities)
    assert dealt.shape == (len(capacities), partitions.count)
    assert (dealt.sum(axis=1) == capacities).all()
    assert (dealt <= rooms).all() and (dealt >= 0).all()
    for row in dealt:
        assert row.max() - row[row < rooms].min(initial=row.max()) <= 1, (
            "one could have had what another has"
        )
    if (dealt < rooms).all():
        assert np.ptp(dealt.sum(axis=0)) <= 1


@given(st.integers(1, 9), st.data())
@settings(max_examples=100)
def test_every_device_gets_a_slot_wherever_there_are_enough(
    num_experts: int, data: st.DataObject
) -> None:
    partitions = Partitions(num_experts, data.draw(st.integers(1, num_experts)))
    capacities = np.array(data.draw(st.lists(st.integers(1, num_experts), min_size=1, max_size=6)))
    evened = partitions.evened(capacities)
    assert evened.sum() == capacities.sum() and evened.max() <= capacities.max()
    if capacities.sum() >= partitions.count * len(capacities):
        assert partitions.dealt(evened).min() >= 1
    else:
        assert (evened == capacities).all()


def test_what_does_not_divide_goes_round() -> None:
    three = Partitions(8, 3)
    assert three.dealt(np.array([4, 4, 4])).tolist() == [[2, 1, 1], [1, 2, 1], [1, 1, 2]]
    assert Partitions(5, 2).dealt(np.array([5, 4])).tolist() == [[3, 2], [2, 2]]
    assert three.dealt(np.array([7]), num_layers=2).tolist() == [[3, 2, 2]]
    assert three.evened(np.array([6, 1, 3])).tolist() == [4, 3, 3]


def test_devices_have_pools_of_their_own() -> None:
    partitions = Partitions(SHAPE.num_experts, 2)
    by_layer = whole_experts(SHAPE, partitions.dealt(np.array([3, 3, 2])), is_global=False)
    assert [(pool.first, pool.device, pool.num_slots) for pool in by_layer] == [
        (0, 0, 2),
        (0, 1, 1),
        (5, 0, 1),
        (5, 1, 2),
        (10, 0, 1),
        (10, 1, 1),
    ]
    assert [partitions.keys(pool).tolist() for pool in by_layer[2:4]] == [[5, 7, 9], [6, 8]]
    everywhere = whole_experts(SHAPE, partitions.dealt(np.array([3, 3, 2])), is_global=True)
    assert [(pool.device, pool.num_slots) for pool in everywhere] == [(0, 4), (1, 4)]
    assert partitions.keys(everywhere[1]).tolist() == [1, 3, 6, 8, 11, 13]
    assert partitions.hops.tolist() == [0, 1, 0, 1, 0] and Partitions(5).hops is None


def test_there_is_room_for_the_first_experts_of_each_device() -> None:
    assert fitting([5, 1, 2, 3, 0, 4], (1, 2)) == [5, 1, 2]
    assert fitting([5, 1, 2], (2,)) == [5, 1]
    assert fitting([], (0, 0, 0)) == []


def test_an_empty_slot_is_for_experts_of_its_device() -> None:
    """Of three missing experts, 0 and 2 belong to a device that is full."""
    step = Step(0, 1, 0, np.array([[0, 1], [0, 2]]), np.full((2, 2), 0.5, np.float32))
    there = Residents(np.zeros(6, bool), np.ones(6, bool), (0, 1))
    assert NearMiss().choose(step, there).near == {0, 2}
    assert beyond_free(step, there, fill=True).tolist() == [[True, False], [True, True]]
    shadow = parse("miss", "shadow:margin=99")
    loss = np.ones((1, 6, len(WIDTHS)))
    nbytes = {16: 160, 4: 40}
    shadow.prepare(
        Shape(1, 6, 2, 160), Artefacts(replicas=Replicas(nbytes, loss, loss, loss[..., 0]))
    )
    # so that 3 is worth more
    shadow.choose(Step(0, 1, 0, np.array([[3, 5]]), np.full((1, 2), 0.5, np.float32)), there)
    there.resident[3] = True
    there.absent[3] = False
    assert shadow.choose(step, there).behind == (1,)


POLICIES = (
    {"eviction": "lru"},
    {"eviction": "lcp", "prefetch": "next_gate:distance=2,overfetch=2"},
    {"eviction": "horizon", "prefetch": "learned"},
    {"eviction": "least_stale", "prefetch": "frequency:distance=2"},
    {"eviction": "belady", "prefetch": "oracle:distance=3"},
    {"eviction": "map", "prefetch": "map"},
    {"miss": "near", "eviction": "score"},
    {"miss": "qstar:ratio=0.5", "residency": "allocated"},
    {"miss": "cold", "residency": "hot:avg_bits=2"},
    {"miss": "cold:swap=0.7", "residency": "hot:migrate=before"},
    {"miss": "buddy:kappa=0.5", "prefetch": "score"},
    {"miss": "drop", "routing": "cache_aware"},
    {"miss": "shadow", "residency": "shadow"},
    {"residency": "split:theta=0.5,passing=6", "prefetch": "next_gate"},
    {"miss": "fetch_priority", "eviction": "lhu"},
)


def spread(case: Case, count: int) -> Case:
    """Spread a case over `count` devices, at most one for each expert, with room for one expert of
    each layer on all of them, three where experts are cut."""
    count = min(count, case.shape.num_experts)
    per_layer = case.num_slots // case.shape.num_layers
    slots = min(max(per_layer, 3 * count), case.shape.num_experts)
    return replace(case, num_slots=slots * case.shape.num_layers, num_devices=count)


@pytest.mark.parametrize("texts", POLICIES, ids=lambda texts: " ".join(texts.values()))
@given(routed(), st.integers(2, 5))
@settings(max_examples=12)
def test_an_expert_is_resident_on_its_own_device_only(
    texts: dict[str, str], case: Case, count: int
) -> None:
    case = spread(case, count)
    try:
        keep_the_contract(case, **texts)
    except BadUsage as problem:  # a split with fewer tops or bottoms than devices
        assert "residency" in texts and "leaves device" in str(problem)


@given(st.integers(2, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_a_device_is_a_cache_of_its_own(count: int, seed: int) -> None:
    """With demand loads and LRU, each device hits and misses as a single device with its experts
    and slots would."""
    rng = np.random.default_rng(seed)
    shape = Shape(2, 7, 2, 100)
    owner = build_controller(
        build(PLAIN),
        shape,
        num_slots=4 * count,
        scope=Scope.LAYER,
        window=0,
        artefacts=Artefacts(),
        num_devices=count,
    )
    alone: dict = {
        (layer, device): {} for layer in range(2) for device in range(count)
    }  # experts by their last use
    hits = [0] * count
    for number in range(30):
        owner.begin_pass(1)
        for layer in range(2):
            selected = rng.permutation(7)[:2]
            owner.step(Step(number, 1, layer, selected[None], np.ones((1, 2), np.float32)))
            for device in range(count):
                wanted = [expert for expert in selected.tolist() if expert % count == device]
                held = alone[layer, device]
                hits[device] += sum(expert in held for expert in wanted)
                held |= dict.fromkeys(wanted, number)
                while len(held) > 2:
                    del held[
                        min((use, expert) for expert, use in held.items() if expert not in wanted)[
                            1
                        ]
                    ]
    found = owner.by_device()
    assert [one["hits"] for one in found] == hits
    assert [one["slots"] for one in found] == [4] * count
    assert [one["hops"] for one in found] == [0] + [1] * (count - 1)
    assert sum(one["demand_bytes"] for one in found) == owner.counters.totals()["demand_bytes"]


@pytest.mark.parametrize(("kappa", "devices", "after"), [(0.0, 2, 1), (0.5, 2, 2), (0.5, 1, 1)])
def test_a_buddy_farther_away_is_worth_less(kappa: float, devices: int, after: int) -> None:
    """The better of two buddies of expert 0, 1, is on the other device: half of its .6 is less than
    the .4 of 2."""
    shape = Shape(1, 6, 2, 100)
    known = Artefacts(
        buddies=np.tile([1, 2], (1, 6, 1)),
        buddy_q=np.tile([0.6, 0.4], (1, 6, 1)),
        entropy=np.zeros((1, 101)),
    )
    owner = build_controller(
        build(PLAIN | {"miss": f"buddy:kappa={kappa},beta=0"}),
        shape,
        num_slots=4,
        scope=Scope.LAYER,
        window=0,
        artefacts=known,
        num_devices=devices,
    )
    owner.begin_pass(1)
    weights = np.full((1, 2), 0.5, np.float32)
    for selected in ([4, 1], [4, 2]):
        owner.step(Step(0, 1, 0, np.array([selected]), weights))
    owner._miss.beta = 0.9  # set late: the experts before are to be fetched
    plan = owner.step(Step(0, 1, 0, np.array([[4, 0]]), weights))
    assert plan.selected.tolist() == [[4, after]]


def test_too_little_for_so_many_devices() -> None:
    with pytest.raises(BadUsage, match="a layer has 5 experts, so give 1 to 5"):
        Partitions(5, 6)
    with pytest.raises(
        BadUsage, match="one expert a layer on each of 2 devices is the least: give at least 6x"
    ):
        budget.num_slots("5x", SHAPE, per_layer=True, num_devices=2)
    assert budget.num_slots("6x", SHAPE, per_layer=True, num_devices=2) == 6
    assert budget.num_slots("2x", SHAPE, per_layer=False, num_devices=2) == 2
    with pytest.raises(BadUsage, match="leaves device 1 without a slot"):
        check_each_has_a_slot((Pool(0, 5, 1, 100), Pool(0, 5, 0, 100, device=1)))
    check_each_has_a_slot((Pool(0, 5, 0, 100), Pool(0, 5, 0, 100, device=1)))
