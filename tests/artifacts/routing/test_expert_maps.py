"""Expert maps: scores against brute force, the capacity of a full store, and the laws of
selection."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.errors import BadInput, BadUsage, OutOfResources
from artifacts.routing.expert_maps import (
    ExpertMaps,
    best_matches,
    map_nbytes,
    mean_rows,
    priorities,
    select_experts,
)

TOLERANCE = {"float32": 1e-5, "float16": 3e-3}
sizes = st.tuples(*(st.integers(1, most) for most in (9, 5, 7, 6)))  # N, L, E, H
dtypes = st.sampled_from(sorted(TOLERANCE))


def distributions(random: np.random.Generator, *shape: int) -> np.ndarray:
    logits = 3 * random.standard_normal(shape)
    return (np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)).astype(np.float32)


def filled(
    random: np.random.Generator, size: tuple[int, ...], *, dtype: str = "float32"
) -> tuple[ExpertMaps, np.ndarray, np.ndarray]:
    num_maps, num_layers, num_experts, hidden = size
    maps = ExpertMaps(
        num_maps,
        num_layers=num_layers,
        num_experts=num_experts,
        hidden=hidden,
        distance=1,
        dtype=dtype,
    )
    embeddings = random.standard_normal((num_maps, hidden)).astype(np.float32)
    probabilities = distributions(random, num_maps, num_layers, num_experts)
    assert maps.add(embeddings, probabilities).tolist() == list(range(num_maps))
    return maps, embeddings, probabilities


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    first = first.ravel().astype(float)
    second = second.ravel().astype(float)
    length = np.linalg.norm(first) * np.linalg.norm(second)
    return float(first @ second / length) if length else 0.0


@given(sizes, st.integers(1, 3), dtypes, st.integers(0, 99))
def test_scores_are_those_of_brute_force(
    size: tuple[int, ...], num_requests: int, dtype: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    maps, embeddings, probabilities = filled(random, size, dtype=dtype)
    queries = random.standard_normal((num_requests, size[3])).astype(np.float32)
    seen = distributions(random, num_requests, *size[1:3])
    expected = [[cosine(query, other) for other in embeddings] for query in queries]
    assert maps.semantic_scores(queries) == pytest.approx(np.array(expected), abs=TOLERANCE[dtype])
    under_way = maps.begin(num_requests)
    for layer in range(size[1]):
        under_way.update(seen[:, layer])
        prefix = slice(layer + 1)
        expected = [
            [cosine(query[prefix], other[prefix]) for other in probabilities] for query in seen
        ]
        whole = maps.trajectory_scores(seen[:, prefix])
        assert whole == pytest.approx(np.array(expected), abs=TOLERANCE[dtype])
        assert under_way.scores() == pytest.approx(whole, abs=1e-5)
        assert (np.abs(whole) <= 1).all() and (np.abs(under_way.scores()) <= 1).all()
    rows, scores = best_matches(under_way.scores())
    assert scores.tolist() == under_way.scores().max(axis=1).tolist()
    assert maps.layer(rows, 0).dtype == np.float32 and maps.layer(rows, 0).shape == (
        num_requests,
        size[2],
    )


@given(sizes, st.integers(0, 12), st.integers(0, 4), dtypes, st.integers(0, 99), st.data())
def test_a_full_store_replaces_the_map_most_similar_to_the_newcomer(
    size: tuple[int, ...],
    num_more: int,
    num_before: int,
    dtype: str,
    seed: int,
    data: st.DataObject,
) -> None:
    capacity, num_layers, num_experts, hidden = size
    distance = data.draw(st.integers(1, num_layers))
    random = np.random.default_rng(seed)
    total = capacity + num_more
    embeddings = random.standard_normal((total, hidden)).astype(dtype)
    probabilities = distributions(random, total, num_layers, num_experts).astype(dtype)
    maps = ExpertMaps(
        capacity,
        num_layers=num_layers,
        num_experts=num_experts,
        hidden=hidden,
        distance=distance,
        dtype=dtype,
    )
    cut = min(num_before, total)
    rows = np.concatenate(
        [maps.add(embeddings[part], probabilities[part]) for part in (slice(cut), slice(cut, None))]
    )
    held = list(range(min(capacity, total)))
    share = distance / num_layers
    for newcomer in range(len(held), total):
        similar = [
            share * cosine(embeddings[newcomer], embeddings[other])
            + (1 - share) * cosine(probabilities[newcomer], probabilities[other])
            for other in held
        ]
        # Rounding may decide between equally similar maps.
        assert similar[rows[newcomer]] == pytest.approx(max(similar), abs=TOLERANCE[dtype])
        held[rows[newcomer]] = newcomer
    assert len(maps) == len(held) <= capacity
    assert maps.num_replaced == num_more
    assert np.array_equal(maps.probabilities, probabilities[held])
    assert maps.semantic_scores(embeddings[held].astype(np.float32)).diagonal() == pytest.approx(
        1, abs=2e-3
    )


def test_many_newcomers_at_once_are_as_one_after_another() -> None:
    random = np.random.default_rng(5)
    at_once, *_ = filled(random, (30, 4, 8, 16))
    singly = ExpertMaps.of(at_once.embeddings.copy(), at_once.probabilities.copy(), distance=1)
    more = random.standard_normal((1300, 16)).astype(np.float32), distributions(random, 1300, 4, 8)
    rows = at_once.add(*more)
    assert rows.tolist() == [
        int(singly.add(*(part[i : i + 1] for part in more))[0]) for i in range(1300)
    ]
    assert np.array_equal(at_once.probabilities, singly.probabilities)
    assert at_once.num_replaced == singly.num_replaced == 1300
    assert len(np.unique(rows)) > 20


def test_a_store_of_given_maps_is_a_copy_with_room_for_more() -> None:
    random = np.random.default_rng(0)
    maps, *_ = filled(random, (5, 3, 4, 6))
    embeddings = maps.embeddings.copy()
    probabilities = maps.probabilities.copy()
    # as arrays that are read from a database
    embeddings.flags.writeable = probabilities.flags.writeable = False
    other = ExpertMaps.of(embeddings, probabilities, capacity=6, distance=2)
    queries = distributions(random, 2, 3, 4)
    assert np.array_equal(other.trajectory_scores(queries), maps.trajectory_scores(queries))
    assert other.add(embeddings[:2], probabilities[:2]).tolist() == [5, 1]
    assert (len(other), other.capacity, other.num_replaced, other.version) == (6, 6, 1, 1)
    assert ExpertMaps.of(embeddings, probabilities).capacity == 5


def test_a_pass_does_not_outlive_a_change_of_the_maps() -> None:
    maps, embeddings, probabilities = filled(np.random.default_rng(0), (5, 3, 4, 6))
    under_way = maps.begin(1)
    under_way.update(probabilities[:1, 0])
    maps.add(embeddings[:1], probabilities[:1])
    with pytest.raises(AssertionError, match="in the middle of a pass"):
        under_way.update(probabilities[:1, 1])


def test_nothing_is_like_nothing() -> None:
    maps = ExpertMaps(2, num_layers=2, num_experts=3, hidden=4, distance=2)
    maps.add(np.zeros((1, 4)), np.zeros((1, 2, 3)))
    assert maps.semantic_scores(np.ones((1, 4))).tolist() == [[0]]
    assert maps.trajectory_scores(np.ones((1, 1, 3))).tolist() == [[0]]


def test_what_a_store_refuses() -> None:
    shape = {"num_layers": 2, "num_experts": 3, "hidden": 4}
    with pytest.raises(BadUsage, match="distance must be 1 to 2"):
        ExpertMaps(1, **shape, distance=3)
    with pytest.raises(BadUsage, match="capacity of at least 1"):
        ExpertMaps(0, **shape, distance=1)
    with pytest.raises(BadUsage, match="did you mean float16"):
        ExpertMaps(1, **shape, distance=1, dtype="floot16")
    with pytest.raises(OutOfResources, match="give a smaller capacity"):
        ExpertMaps(10**18, **shape, distance=1)
    for bad in (np.nan, np.inf):
        with pytest.raises(BadInput, match="not finite"):
            ExpertMaps(1, **shape, distance=1).add(np.full((1, 4), bad), np.ones((1, 2, 3)))


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("float16", 2)])
def test_memory_is_what_the_arrays_take(dtype: str, width: int) -> None:
    maps, *_ = filled(np.random.default_rng(0), (5, 3, 4, 6), dtype=dtype)
    assert maps.nbytes == 5 * map_nbytes(3, 4, 6, dtype) == 5 * ((3 * 4 + 6) * width + 3 * 4)
    assert maps.nbytes == maps.embeddings.nbytes + maps.probabilities.nbytes + maps._inverse.nbytes


probabilities_of_a_layer = st.lists(st.integers(0, 5), min_size=1, max_size=12).filter(any)


@given(probabilities_of_a_layer, st.floats(-0.5, 1.5), st.integers(1, 14))
def test_selection(parts: list[int], score: float, k: int) -> None:
    probabilities = np.array(parts) / sum(parts)
    chosen = select_experts(probabilities, score, k)
    delta = float(np.clip(1 - score, 0, 1))
    by_hand = sorted(range(len(parts)), key=lambda expert: (-probabilities[expert], expert))
    assert chosen == by_hand[: len(chosen)]
    assert len(chosen) >= min(k, len(parts))
    assert len(chosen) == len(parts) or probabilities[chosen].cumsum()[-1] >= delta
    if len(chosen) > k:  # no more than needed
        assert probabilities[chosen[:-1]].cumsum()[-1] < delta
    clipped = min(max(score, 0.0), 1.0)
    assert chosen == select_experts(probabilities, clipped, k)


def test_selection_by_hand() -> None:
    probabilities = np.array([0.1, 0.4, 0.4, 0.1], np.float32)
    assert select_experts(probabilities, 1.0, 1) == [1]
    assert select_experts(probabilities, 0.5, 1) == [1, 2]
    assert select_experts(probabilities, 0.15, 1) == [1, 2, 0]
    assert select_experts(probabilities, -3.0, 2) == [1, 2, 0, 3]
    assert select_experts(probabilities, 2.0, 3) == [1, 2, 0]
    assert all(type(expert) is int for expert in select_experts(probabilities, 0.5, 2))


def test_layers_further_away_are_less_urgent() -> None:
    assert priorities(np.array([0.6, 0.3]), 3).tolist() == pytest.approx([0.2, 0.1])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 99))
def test_means_of_groups(lengths: list[int], seed: int) -> None:
    values = np.random.default_rng(seed).random((sum(lengths), 3)).astype(np.float32)
    last = np.cumsum(lengths) - 1
    expected = [part.mean(axis=0) for part in np.split(values, last[:-1] + 1)]
    assert mean_rows(values, last) == pytest.approx(np.array(expected))
    assert mean_rows(values, last).dtype == np.float32
