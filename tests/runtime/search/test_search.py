"""The search on a small synthetic trace: it finds what trying everything finds, and the same again
for a seed."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from artifacts.errors import BadInput, Problem
from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import ModelShape
from artifacts.quantisation.replicas import typical
from artifacts.routing.similarity import Similarity
from artifacts.shape import Shape
from artifacts.traces.synthetic import Dials, generate
from artifacts.traces.trace import PREFILL, cut_by_request, is_one_by_one
from runtime.policies.base import Artefacts
from runtime.search.halving import one_by_one
from runtime.search.results import LossScale, SearchPlan, Tried
from runtime.search.search import Search
from runtime.search.space import Combination

pytestmark = pytest.mark.slow

SHAPE = Shape(num_layers=3, num_experts=12, top_k=3, expert_nbytes=3 * 64 * 32 * 2)
MODEL = ModelShape("small", SHAPE, hidden=64, vocabulary=100)
TRACE = generate(Dials(tokens=100, requests=3, prompt=8, predictability=0.7), SHAPE)
FAST = [
    Combination(prefetch=prefetch, eviction=eviction, miss=miss)
    for prefetch, eviction, miss in product(
        ("none", "next_gate"), ("lru", "lfu"), ("fetch", "near")
    )
]
LOSSY = [
    Combination(miss=miss, eviction=eviction)
    for miss in ("drop:rank=2", "zero")
    for eviction in ("lru", "lfu")
]
PLAN = SearchPlan(candidates=8, passes=200, climbing=4, seed=0, max_loss=0.5)


def similar(left_out: float = 0.01) -> Similarity:
    size = (SHAPE.num_layers, SHAPE.num_experts)
    many = np.full((*size, SHAPE.num_experts), 0.02)
    return Similarity(many, many, np.full(size, left_out), np.ones(size, np.int64))


def search(**changed: object) -> Search:
    known = {"artefacts": Artefacts(), "budget": "25%", "similarity": similar()} | changed
    found = Search(TRACE, MODEL, machine("rtx3090-pcie4"), **known)
    found.scale = LossScale(few_bits=1.0, replaced=1.0)
    return found


def test_it_finds_what_trying_everything_finds() -> None:
    tried = search()
    found = tried.run(PLAN, spaces=(FAST, LOSSY))
    times = {one: tried.replay(one, PLAN.passes).ms for one in FAST}
    assert found.lossless[0].ms == min(times.values()) and times[
        found.lossless[0].combination
    ] == min(times.values())
    lossy = {one: tried.replay(one, PLAN.passes) for one in LOSSY}
    assert min(found.lossy, key=lambda one: one.ms).ms == min(one.ms for one in lossy.values())


def test_it_is_the_same_for_a_seed() -> None:
    few = replace(PLAN, candidates=3, climbing=6, passes=60)
    first, again = (search().run(few) for _ in range(2))
    assert (first.lossless, first.lossy, first.num_replays) == (
        again.lossless,
        again.lossy,
        again.num_replays,
    )
    other = search().run(replace(few, seed=1))
    assert {one.combination for one in (*other.lossless, *other.lossy)} != {
        one.combination for one in (*first.lossless, *first.lossy)
    }


def test_what_the_store_or_the_trace_lacks_is_left_out_and_counted() -> None:
    spaces = ([*FAST, Combination(prefetch="learned")], [Combination(miss="fetch_lowest")])
    found = search(similarity=None).run(PLAN, spaces=spaces)
    for command in ("build-predictor", "quantize"):
        assert any(f"moectl {command}" in why for why in found.refused)
    assert Combination(prefetch="learned") not in {one.combination for one in found.lossless}


def test_losses_come_from_the_tables() -> None:
    """Every dropped rank of a decoded token costs what the similarity table says, more in earlier
    layers."""
    drop = Combination(miss="zero:fill=no")
    outcome = search().replay(drop, 60)
    tripled = search(similarity=similar(0.03)).replay(drop, 60)
    assert 0 < outcome.loss < tripled.loss and tripled.damage[1] == pytest.approx(
        3 * outcome.damage[1]
    )
    assert search().replay(FAST[0], 60).loss == 0.0
    with pytest.raises(BadInput, match="moectl profile"):
        search(similarity=None).replay(drop, 60)
    unscaled = search()
    unscaled.scale = LossScale()
    assert unscaled.replay(drop, 60).loss is None


def test_few_bits_cost_by_their_width() -> None:
    use = np.ones((SHAPE.num_layers, SHAPE.num_experts))
    known = Artefacts(replicas=typical(use, expert_nbytes=SHAPE.expert_nbytes))
    wide, narrow = (
        search(artefacts=known).replay(
            Combination(miss="shadow", residency=f"shadow:bits={bits},slots=no"), 60
        )
        for bits in (3, 1)
    )
    assert narrow.damage[0] / wide.damage[0] == pytest.approx(0.139 / 0.0037)
    assert wide.exposed_ms == 0 and wide.damage[1] == 0


def test_what_alters_the_output_is_never_lossless_whatever_its_tables_say() -> None:
    """As where a live run of a few tokens found no divergence, so that errors seem to cost
    nothing."""
    use = np.ones((SHAPE.num_layers, SHAPE.num_experts))
    known = Artefacts(replicas=typical(use, expert_nbytes=SHAPE.expert_nbytes))
    found = search(artefacts=known)
    found.scale = LossScale(few_bits=0.0, replaced=0.0)
    shadow = Combination(miss="shadow", residency="shadow:bits=3,slots=no")
    tried = found.replay(shadow, 60)
    assert tried.loss == 0.0 and tried.altered > 0 and not tried.is_lossless
    assert all(one.is_lossless for one in found.run(PLAN, spaces=(FAST, [shadow])).lossless)
    assert all(found.replay(one, 60).is_lossless for one in FAST)


def test_what_altered_nothing_by_chance_is_no_lossless_answer() -> None:
    """No token's weakest rank is left out within a tolerance of nothing, but the next text may have
    one."""
    chance = Combination(miss="drop:rank=1,tolerance=0")
    found = search(budget="100%").run(PLAN, spaces=(FAST[:2], [chance]))
    assert chance not in {one.combination for one in found.lossless}


def test_nothing_is_brought_or_evicted_where_replicas_leave_no_slot() -> None:
    """Prefetching for no slot costs nothing on virtual time, and keeps a live run from computing
    all layers at once."""
    use = np.ones((SHAPE.num_layers, SHAPE.num_experts))
    known = Artefacts(replicas=typical(use, expert_nbytes=SHAPE.expert_nbytes))
    busy = Combination(
        prefetch="next_gate",
        eviction="lfu",
        miss="shadow:margin=8",
        residency="shadow",
        scope="global",
    )
    plain = Combination(miss="shadow", residency="shadow")
    slots = search(artefacts=known, budget="60%")
    assert search(artefacts=known, budget="12.5%").replay(busy, 60).combination == plain
    assert slots.replay(busy, 60).combination == busy
    found = search(artefacts=known, budget="12.5%").run(
        PLAN, spaces=(FAST, [busy, busy._replace(eviction="lru")])
    )
    assert [one.combination for one in found.lossy].count(plain) == 1


def test_an_assumption_of_many_replays_is_told_once() -> None:
    found = search()
    before = found.assumed
    found.count(
        [
            "the split of 10% is solved (even, 1.2): here",
            "the split of 10% is solved (greedy, 1.1): here",
        ]
    )
    assert found.assumed == [*before, "the split of 10% is solved (even, 1.2): here"]


def test_the_front_has_nothing_that_another_beats() -> None:
    found = search().run(PLAN, spaces=(FAST, LOSSY))
    front = found.front()
    assert front == sorted(front, key=lambda one: one.ms)
    assert [one.loss for one in front] == sorted((one.loss for one in front), reverse=True)


def test_a_trace_is_cut_between_requests() -> None:
    first, rest = cut_by_request(TRACE, 0.25)
    assert set(first.request.tolist()).isdisjoint(rest.request.tolist()) and len(first) + len(
        rest
    ) == len(TRACE)
    with pytest.raises(BadInput, match="one request"):
        cut_by_request(first.take(np.flatnonzero(first.request == 0)), 0.25)


def test_traces_of_one_request_at_a_time_are_told_from_batches() -> None:
    assert is_one_by_one(TRACE)
    assert not is_one_by_one(
        replace(TRACE, pass_=np.zeros_like(TRACE.pass_), request=TRACE.token // 8)
    )
    assert not is_one_by_one(TRACE.take(np.flatnonzero(TRACE.phase == PREFILL)))


def test_a_search_finds_the_same_with_any_replayer() -> None:
    """A similar search replays all combinations at once and in another order."""
    few = replace(PLAN, candidates=3, climbing=6, passes=30)
    here = search()
    other = search()
    elsewhere = other.apart()

    def backwards(combinations: list[Combination], passes: int) -> list[Tried | Problem]:
        found = [*one_by_one(elsewhere.replay)(combinations[::-1], passes)][::-1]
        for _ in (one for one in found if isinstance(one, Tried)):
            other.count(elsewhere.assumed)
        return found

    ours = here.run(few)
    theirs = other.run(few, replay_all=backwards)
    assert (ours.num_tried, ours.num_replays) == (theirs.num_tried, theirs.num_replays)
    assert sorted(here.assumed) == sorted(other.assumed)
    assert (ours.lossless, ours.lossy, ours.published, ours.refused) == (
        theirs.lossless,
        theirs.lossy,
        theirs.published,
        theirs.refused,
    )
