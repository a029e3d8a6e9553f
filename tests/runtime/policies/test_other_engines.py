"""Policies of other engines, by hand and beside replays that are written from their rules alone."""

import numpy as np
import pytest

from artifacts.errors import BadUsage
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import PREFILL, Trace
from runtime.policies import parse
from runtime.policies.presets import Scope
from tests import TRACE
from tests.runtime.policies.contract import Case, run
from tests.runtime.policies.examples import prepared, residents, step
from tools.make.golden import SHAPE


@pytest.fixture(scope="module")
def trace() -> Trace:
    recorded = read_parquet(TRACE, num_experts=SHAPE.num_experts)
    return recorded.take(recorded.request < 2)


def counted(trace: Trace, num_slots: int, scope: Scope, **texts: str) -> tuple[int, int]:
    """Return hits and fetches of these policies."""
    case = Case(SHAPE, trace, num_slots, scope, 2 * SHAPE.expert_nbytes)
    totals = run(case, **texts).counters.totals()
    return totals["hits"], totals["fetched"]


def test_a_share_of_the_misses_is_near_once_the_scope_is_full() -> None:
    """Of four and four and two misses at .6, what is due rises to 1.6, 2.2 less 1, 2 less 1."""
    policy = prepared("miss", "share:near=0.6")
    wanted = step([[0, 1, 2, 3]])
    assert policy.choose(wanted, residents(num_free=1)).near == frozenset()
    assert [
        sorted(policy.choose(step([selected]), residents(5)).near)
        for selected in ([0, 1, 2, 3], [0, 1, 2, 3], [5, 4, 3])
    ] == [[1, 2, 3], [2, 3], [3]]
    assert not policy.choose(wanted, residents()).behind


def test_a_step_of_more_tokens_leaves_the_cache_alone() -> None:
    policy = prepared("miss", "share:near=0,tokens=2")
    many = step([[0, 1], [1, 2], [3, 4]], phase=PREFILL)
    assert policy.choose(many, residents(4, num_free=2)).near == {0, 1, 2, 3}
    assert policy.choose(step([[0, 1], [1, 2]]), residents(4)).near == frozenset()


def freetoken(trace: Trace, num_slots: int, ratio: float) -> tuple[int, int]:
    """Return hits and fetches: prompts fetch all, other steps as many as link and host balance."""
    held: dict[tuple[int, int], int] = {}  # key: its last use
    used: dict[tuple[int, int], int] = {}  # in decoded steps
    hits = fetches = 0
    for number, one in enumerate(trace.steps()):
        wanted = list(dict.fromkeys((one.layer, e) for row in one.experts.tolist() for e in row))
        missing = [key for key in wanted if key not in held]
        hits += len(wanted) - len(missing)
        fetched = missing
        if one.phase != PREFILL:
            missing.sort(key=lambda key: (-used.get(key, -1), key))
            times = [max(f * (1 - ratio), (len(missing) - f) * ratio) for f in range(99)]
            fetched = missing[: times.index(min(times))]
            used.update(dict.fromkeys(wanted, number))
        held.update({key: number for key in wanted if key in held})
        for key in fetched:
            if len(held) == num_slots:
                del held[min((at, other) for other, at in held.items() if at < number)[1]]
            held[key] = number
        fetches += len(fetched)
    return hits, fetches


@pytest.mark.parametrize("num_slots", [64, 128])
def test_hybrid_counts_as_a_replay_by_its_rule(trace: Trace, num_slots: int) -> None:
    assert counted(trace, num_slots, Scope.GLOBAL, miss="hybrid:ratio=0.375") == freetoken(
        trace, num_slots, 0.375
    )


def test_hybrid_fetches_the_last_used_first_and_at_most_so_many() -> None:
    policy = prepared("miss", "hybrid:most=1")
    assert policy.choose(step([[2, 4]]), residents()).near == {4}, "equals by the lower expert"
    policy.choose(step([[4, 5]]), residents(4, 5))
    assert policy.choose(step([[2, 4]]), residents()).near == {2}
    assert policy.choose(step([[2, 4]], phase=PREFILL), residents()).near == frozenset()


def strata(trace: Trace, num_slots: int) -> int:
    """Return the hits of a tier that is put in order every four passes. What a layer is to hold comes
    during its next step, or the one after into a slot whose expert that step still uses."""
    room = num_slots // SHAPE.num_layers
    wanted = [[] for _ in range(SHAPE.num_layers)]
    inside = [set() for _ in range(SHAPE.num_layers)]
    counts = np.zeros((SHAPE.num_layers, SHAPE.num_experts))
    hits = passes = 0
    for one in trace.steps():
        np.add.at(counts[one.layer], one.experts, 1)
        used = inside[one.layer].intersection(one.experts.ravel().tolist())
        hits += len(used)
        ends_pass = one.layer == SHAPE.num_layers - 1 and one.phase != PREFILL
        passes += ends_pass
        if ends_pass and passes % 4 == 0:
            moves = [
                move for at, held in enumerate(wanted) for move in gains(at, held, counts, room)
            ]
            for _, at, comes, leaves in sorted(moves)[:96]:
                wanted[at] = [e for e in wanted[at] if e != leaves] + [comes]
            counts *= 0.7
        stays = inside[one.layer].intersection(wanted[one.layer])
        coming = [expert for expert in wanted[one.layer] if expert not in stays]
        inside[one.layer] = stays.union(coming[: room - len(stays | used)])
    return hits


def gains(layer: int, held: list[int], counts: np.ndarray, room: int) -> list[tuple]:
    """Return gain (negative), layer, the expert that comes and the one that leaves, of each move."""
    uses = counts[layer]
    outside = [e for e in range(SHAPE.num_experts) if e not in held and uses[e] >= 2]
    outside.sort(key=lambda e: -uses[e])
    leaving = [-1] * (room - len(held)) + sorted(held, key=lambda e: (uses[e], e))
    pairs = [
        (a, b, uses[a] - (uses[b] if b >= 0 else 0)) for a, b in zip(outside, leaving, strict=False)
    ]
    return [(-gain, layer, a, b) for a, b, gain in pairs if b < 0 or gain >= 1.5]


@pytest.mark.parametrize("num_slots", [64, 128])
def test_an_adaptive_tier_hits_as_often_as_a_replay_by_its_rule(
    trace: Trace, num_slots: int
) -> None:
    """Over a link that moves all that comes in one step."""
    case = Case(SHAPE, trace, num_slots, Scope.LAYER, 999 * SHAPE.expert_nbytes)
    texts = {"miss": "near:fill=no,waits=no", "residency": "adaptive"}
    totals = run(case, **texts).counters.totals()
    assert totals["hits"] == strata(trace, num_slots)
    assert totals["fetched"] == totals["late"] == 0 and totals["prefetches"] > 100


@pytest.mark.parametrize(
    ("axis", "text"),
    [
        ("miss", "share:near=1.5"),
        ("miss", "share:tokens=-1"),
        ("miss", "hybrid:ratio=0"),
        ("miss", "hybrid:most=-1"),
        ("residency", "adaptive:every=0"),
        ("residency", "adaptive:margin=0"),
    ],
)
def test_a_parameter_without_sense_is_refused(axis: str, text: str) -> None:
    with pytest.raises(BadUsage, match=f"{text.partition(':')[0]} needs"):
        parse(axis, text)


def test_class_lru_does_not_note_a_step_of_more_tokens() -> None:
    policy = prepared("eviction", "class_lru:tokens=1")
    keys = np.arange(3)
    before = [column.tolist() for column in policy.order(keys, None)]
    policy.used([0, 1], step([[0, 1], [1, 0]]), None)
    assert [column.tolist() for column in policy.order(keys, None)] == before
