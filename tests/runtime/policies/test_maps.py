"""Matching by hand: which match a step gets, what is prefetched and evicted by it, what is added to
the maps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.errors import BadUsage, Incompatible
from artifacts.routing.expert_maps import ExpertMaps, select_experts
from artifacts.shape import Shape
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import DECODE, PREFILL
from runtime.policies import parse
from runtime.policies.base import Artefacts, Now, Step
from runtime.policies.presets import Scope
from runtime.policies.shared import map_kernels
from runtime.policies.shared.maps import Guide, Matching
from runtime.policies.step import Opening
from runtime.replay.from_trace import maps
from tests import TRACE
from tests.runtime.policies.contract import Case, run

SHAPE = Shape(num_layers=4, num_experts=6, top_k=2, expert_nbytes=160)
NUM_MAPS = 5
HIDDEN = 3


def distributions(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(6, 0.3), (count, 4)).astype(np.float32)


def embeddings(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


def some_maps(capacity: int = NUM_MAPS) -> ExpertMaps:
    maps = ExpertMaps(capacity, num_layers=4, num_experts=6, hidden=HIDDEN, distance=2)
    maps.add(embeddings(0, NUM_MAPS), distributions(0, NUM_MAPS))
    return maps


def steps(
    said: np.ndarray, given: np.ndarray, *, pass_index: int = 0, phase: int = DECODE
) -> list[Step]:
    """Return the steps of a pass of R requests of one token each: probabilities `said` [R, L, E],
    embeddings `given` [R, H]."""
    last = np.arange(len(said))
    selected = np.tile([0, 1], (len(said), 1))
    weights = np.full(selected.shape, 0.5, np.float32)
    return [
        Step(
            pass_index, phase, layer, selected, weights, said[:, layer], last=last, embedding=given
        )
        for layer in range(4)
    ]


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_an_answer_is_that_of_the_steps_before(lag: int) -> None:
    maps = some_maps()
    said = distributions(7, 2)
    given = embeddings(7, 2)
    matching = Matching(maps, SHAPE)
    for step in steps(said, given):
        matching.see(step)
        matching.see(step)  # by the other policy
        match = matching.match(lag)
        layer = step.layer - lag - 1
        if layer < -1:
            assert match is None
            continue
        scores = (
            maps.semantic_scores(given)
            if layer < 0
            else maps.trajectory_scores(said[:, : layer + 1])
        )
        assert match.layer == layer
        assert match.scores == pytest.approx(scores.max(axis=1), abs=1e-6)
        assert np.array_equal(match.probabilities, maps.probabilities[scores.argmax(axis=1)])
    other = embeddings(8, 1)
    matching.begin(Opening(1, DECODE, other))
    matching.begin(Opening(1, DECODE, other))  # by the other policy
    for known in (matching.match(lag), matching.match()):  # before the first step, whatever the lag
        assert (matching.layer, known.layer) == (-1, -1)
        assert known.scores == pytest.approx(maps.semantic_scores(other).max(axis=1), abs=1e-6)


def test_what_it_brings() -> None:
    """d = distance = 2: in the first step layers 1 and 2 by the embedding, then layer 3 by the
    trajectory."""
    maps = some_maps()
    said = distributions(7, 1)
    given = embeddings(7, 1)
    policy = parse("prefetch", "map:distance=2")
    policy.prepare(SHAPE, Artefacts(matching=Matching(maps, SHAPE)))
    scores = maps.semantic_scores(given)[0]
    best = int(scores.argmax())
    score = scores.max()
    expected = [
        (maps.probabilities[best, layer, expert] / layer, layer * 6 + expert)
        for layer in (1, 2)
        for expert in select_experts(maps.probabilities[best, layer], score, 2)
    ]
    first, second, third, fourth = steps(said, given)
    assert policy.propose(first, Now()).tolist() == [
        key for _, key in sorted(expected, key=lambda at: -at[0])
    ]
    scores = maps.trajectory_scores(said[:, :1])[0]
    best = int(scores.argmax())
    score = scores.max()
    coming = select_experts(maps.probabilities[best, 3], score, 2)
    still = [key for _, key in expected if key >= 12]
    assert sorted(policy.propose(second, Now()).tolist()) == sorted(
        [*still, *(18 + expert for expert in coming)]
    )
    assert sorted(policy.propose(third, Now()).tolist()) == sorted(18 + expert for expert in coming)
    assert policy.propose(fourth, Now()).tolist() == []


@pytest.mark.parametrize(("distance", "lag"), [(1, 0), (2, 0), (2, 1)])
def test_before_the_first_layer_the_embedding_brings_the_first_layers(
    distance: int, lag: int
) -> None:
    maps = some_maps()
    said = distributions(7, 2)
    given = embeddings(7, 2)
    policy = parse("prefetch", f"map:distance={distance},lag={lag},threshold=no")
    policy.prepare(SHAPE, Artefacts(matching=Matching(maps, SHAPE)))
    assert policy.opens_passes and not parse("prefetch", "map:semantic=no").opens_passes
    best = maps.probabilities[maps.semantic_scores(given).argmax(axis=1)]  # [R, L, E]
    chosen = [
        (-best[:, layer].sum(axis=0)[expert] / (layer + 1), layer * 6 + expert)
        for layer in range(distance)
        for expert in sorted(
            {expert for p in best[:, layer] for expert in select_experts(p, 1.0, 2)}
        )
    ]
    first = policy.propose_first(Opening(0, DECODE, given), Now()).tolist()
    assert first == [key for _, key in sorted(chosen, key=lambda at: at[0])]
    then = policy.propose(steps(said, given)[0], Now()).tolist()
    assert {key // 6 for key in then} == set(range(1, distance + (not lag))), "layer 0 has run"
    again = policy.propose_first(Opening(1, DECODE, given), Now()).tolist()
    assert again == first, "nothing is left of the pass before"


def test_blend_brings_what_the_embedding_makes_likely_in_the_first_layer() -> None:
    maps = some_maps()
    given = embeddings(7, 2)
    policy = parse("prefetch", "blend:maps=yes,learned=no,floor=0.4")
    policy.prepare(SHAPE, Artefacts(matching=Matching(maps, SHAPE)))
    assert policy.opens_passes and not parse("prefetch", "blend").opens_passes
    chance = 2 * maps.probabilities[maps.semantic_scores(given).argmax(axis=1), 0].max(axis=0)
    likely = [expert for expert in np.argsort(-chance) if chance[expert] >= 0.4]
    assert (
        policy.propose_first(Opening(0, DECODE, given), Now()).tolist() == likely
        and 0 < len(likely) < 6
    )


def test_parts_can_be_left_out() -> None:
    maps = some_maps()
    said = distributions(7, 2)
    given = embeddings(7, 2)
    for text, per_layer in (("map:distance=2,threshold=no", 2), ("map:distance=2", 6)):
        policy = parse("prefetch", text)
        policy.prepare(SHAPE, Artefacts(matching=Matching(maps, SHAPE)))
        keys = policy.propose(steps(said[:1], -given[:1])[0], Now())
        assert len(keys) <= 2 * per_layer and ("no" not in text or len(keys) == 4)
    policy = parse("prefetch", "map:distance=2,semantic=no")
    policy.prepare(SHAPE, Artefacts(matching=Matching(maps, SHAPE)))
    proposed = [policy.propose(step, Now()).tolist() for step in steps(said, given)]
    assert not proposed[0] and proposed[1] and min(proposed[1]) >= 18


def test_a_guide_predicts_the_layer_at_its_distance() -> None:
    maps = some_maps()
    said = distributions(7, 2)
    given = embeddings(7, 2)
    guide = Guide(Matching(maps, SHAPE), distance=1)
    found = [guide.predict(step) for step in steps(said, given)]
    assert found[3] is None
    rows = [maps.semantic_scores(given).argmax(axis=1)]
    rows += [maps.trajectory_scores(said[:, :seen]).argmax(axis=1) for seen in (1, 2)]
    for layer, (row, (probabilities, scores)) in enumerate(
        zip(rows, found[:3], strict=True), start=1
    ):
        assert np.array_equal(probabilities, maps.probabilities[row, layer]) and scores.shape == (
            2,
        )


def test_what_leaves_first_is_least_probable_by_use() -> None:
    """p of the layers that the search covers, over the even chance of 1/6 where it is more; uses
    alone of those behind and beyond."""
    maps = some_maps()
    said = distributions(7, 2)
    given = embeddings(7, 2)
    matching = Matching(maps, SHAPE)
    keys = np.array([0, 1, 2, 7, 8, 13, 19])
    policy = parse("eviction", "map:distance=2")
    policy.prepare(SHAPE, Artefacts(matching=matching))
    # a pass without its first layer
    policy.used([0, 1], steps(said, given, pass_index=4)[1], Now())
    assert policy.order(keys, Now())[0].tolist() == [1, 1, 0, 0, 0, 0, 0], "no match: uses alone"
    policy.used([0, 7, 13, 19], steps(said, given, pass_index=5)[0], Now())
    p = np.maximum(6 * matching.match().probabilities.mean(axis=0).ravel(), 1)
    assert policy.order(keys, Now())[0] == pytest.approx([2, 1, 0, p[7], 0, p[13], 1])
    matching.begin(Opening(6, DECODE, given))  # before the first layer, the first two are ahead
    p = np.maximum(6 * matching.match().probabilities.mean(axis=0).ravel(), 1)
    assert policy.order(keys, Now())[0] == pytest.approx([2 * p[0], p[1], 0, p[7], 0, 1, 1])
    assert p[:12].max() > 1


def test_as_published_every_layer_is_weighed_by_the_matched_map() -> None:
    maps = some_maps()
    said = distributions(7, 2)
    given = embeddings(7, 2)
    matching = Matching(maps, SHAPE)
    keys = np.array([0, 1, 2, 7, 13, 19])
    policy = parse("eviction", "map:over=all")
    policy.prepare(SHAPE, Artefacts(matching=matching))
    for step, used in zip(steps(said, given), ([0, 1], [7], [13], [19]), strict=True):
        policy.used(used, step, Now())
        p = matching.match().probabilities.mean(axis=0).ravel()
        freq = np.isin(keys, range(used[-1] + 1)) * [1, 1, 0, 1, 1, 1]
        assert policy.order(keys, Now())[0] == pytest.approx(p[keys] * freq)


@pytest.mark.parametrize("distance", [1, 3])
def test_in_one_cache_it_keeps_what_is_wanted_better_than_uses_alone(distance: int) -> None:
    recorded = read_parquet(TRACE, num_experts=32)
    shape = Shape(8, 32, 4, expert_nbytes=160)
    case = Case(shape, recorded.take(recorded.request < 2), 64, Scope.GLOBAL, 4 * 160)
    others = maps(recorded.take(recorded.request >= 2), shape, capacity=200)
    ahead = f"map:distance={distance}"
    hits = [
        run(case, others, prefetch=ahead, eviction=way).counters.totals()["hits"]
        for way in (ahead, "lfu")
    ]
    assert hits[0] > hits[1]


def test_before_a_match_use_alone_decides() -> None:
    policy = parse("eviction", "map")
    empty = ExpertMaps(3, num_layers=4, num_experts=6, hidden=HIDDEN, distance=2)
    policy.prepare(SHAPE, Artefacts(matching=Matching(empty, SHAPE)))
    policy.used([2, 3], steps(distributions(7, 1), embeddings(7, 1))[0], Now())
    assert policy.order(np.array([1, 2]), Now())[0].tolist() == [0, 1]


@pytest.mark.parametrize("in_background", [False, True])
def test_whole_iterations_join_the_maps_before_the_next_pass(in_background: bool) -> None:
    maps = some_maps(capacity=NUM_MAPS + 3)
    matching = Matching(maps, SHAPE, learns=True)
    if in_background:
        matching.run_in_background()
    given = embeddings(9, 4)
    said = distributions(9, 4)
    by_hand = maps.copy()
    for number, phase in enumerate((PREFILL, DECODE, DECODE, PREFILL)):
        rows = slice(number, number + 1)
        for step in steps(said[rows], given[rows], pass_index=number, phase=phase):
            matching.see(step)
        if number:  # the same iteration as the pass before is found in the maps
            assert matching.match().scores.max() <= 1
        by_hand.add(given[rows], said[rows])
    broken = steps(said[:1], given[:1], pass_index=9)[:3]
    for step in broken:
        matching.see(step)
    learned = matching.learned()
    matching.close()
    assert np.array_equal(learned.maps.probabilities, by_hand.probabilities)
    assert (len(learned.maps), learned.num_iterations, learned.maps.num_replaced) == (
        NUM_MAPS + 3,
        4,
        1,
    )
    assert len(maps) == NUM_MAPS, "what the store gave stays as it is"
    assert learned.newcomers.tolist()[:2] == [5, 6] and len(learned.newcomers) in (3, 4)
    assert learned.origins.tolist()[-1] == [1, 0] and [0, 1] in learned.origins.tolist()


def test_what_cannot_be_is_refused() -> None:
    for text in ("map:distance=0", "map:lag=-1"):
        with pytest.raises(BadUsage, match="map needs distance >= 1 and lag >= 0"):
            parse("prefetch", text)
    with pytest.raises(Incompatible, match="4 layers of 6 experts, the model 3 of 6"):
        Matching(some_maps(), Shape(3, 6, 2, 1))


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([-0.5, 0.0, 0.3, 0.7, 0.95, 1.0, 2.0]),
    st.integers(1, 6),
)
def test_compiled_choice_is_the_plain_one(seed: int, score: float, top_k: int) -> None:
    probabilities = distributions(seed, 1)[0, 0].round(1)  # some are equal
    chosen = map_kernels.likeliest(probabilities, score, top_k)
    assert chosen.tolist() == select_experts(probabilities, score, top_k)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_compiled_weights_are_means_of_requests_times_uses(seed: int, num_requests: int) -> None:
    said = distributions(seed, num_requests)[:, 0].copy()
    uses = np.arange(6.0)
    worth = np.empty(6)
    map_kernels.weigh(said, 2, 5, 6, 1, uses, worth)
    means = np.add.reduce(said, axis=0, dtype=np.float64) / num_requests
    assert worth.tolist() == [0, 1, *(np.maximum(means * 6, 1) * uses)[2:5].tolist(), 5]
    map_kernels.weigh(said, 0, 6, 1, 0, uses, worth)
    assert worth.tolist() == (means * uses).tolist()
