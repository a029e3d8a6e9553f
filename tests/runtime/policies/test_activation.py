"""MoE-Infinity's matrices by hand: what is counted, which are similar, what they prefetch and
evict."""

from dataclasses import replace

import numpy as np
import pytest

from artifacts.errors import BadUsage
from artifacts.traces.trace import DECODE, PREFILL
from runtime.policies import parse
from runtime.policies.base import Now
from runtime.policies.shared.activations import Activations, Collection, shares
from tests.runtime.policies.examples import SHAPE, prepared, step

SWEET = np.array([[4, 4, 0, 0, 0, 0], [0, 0, 4, 4, 0, 0], [0, 0, 0, 0, 4, 4]])
SOUR = np.array([[0, 0, 4, 4, 0, 0], [4, 4, 0, 0, 0, 0], [0, 4, 4, 0, 0, 0]])


def test_counts_are_of_the_requests_under_way() -> None:
    activations = Activations(SHAPE)
    for number, phase in enumerate([PREFILL, 1, PREFILL]):
        for layer in range(3):
            here = step([[0, layer], [0, -1]], layer=layer, phase=phase, pass_index=number)
            assert (activations.follow(here) is not None) == (phase == PREFILL and layer == 0)
            activations.count(here)
    assert activations.current.tolist() == [
        [3, 0, 0, 0, 0, 0],
        [2, 1, 0, 0, 0, 0],
        [2, 0, 1, 0, 0, 0],
    ]


def test_requests_come_and_go_in_one_pass() -> None:
    """Request 7 is read, then decoded while 8 is read, then both are decoded, then 8 and 9."""
    activations = Activations(SHAPE)
    over = []
    passes = [
        ([7, 7], PREFILL),
        ([7, 8], PREFILL),
        ([7, 8], DECODE),
        ([8, 9], DECODE),
        ([8, 9], DECODE),
    ]
    for number, (requests, phase) in enumerate(passes):
        selected = [[request - 7, 5] for request in requests]
        prompts = np.array([False, True]) if number == 1 else None
        here = replace(
            step(selected, phase=phase, pass_index=number),
            requests=np.array(requests),
            prompts=prompts,
        )
        over += activations.follow(here) or []
        activations.count(here)
        if number == 2:
            assert activations.current[0].tolist() == [4, 2, 0, 0, 0, 6]
    assert activations.current[0].tolist() == [0, 4, 2, 0, 0, 6], "without request 7, which is over"
    assert [matrix[0].tolist() for matrix in over] == [[4, 0, 0, 0, 0, 4]]


def test_a_request_that_waits_for_its_turn_goes_on() -> None:
    activations = Activations(SHAPE)
    for number, (request, phase) in enumerate(
        [(1, PREFILL), (1, DECODE), (2, PREFILL), (1, DECODE)]
    ):
        here = replace(
            step([[request, 0]], phase=phase, pass_index=number), requests=np.array([request])
        )
        activations.follow(here)
        activations.count(here)
    assert activations.current[0].tolist() == [3, 3, 0, 0, 0, 0]


def test_the_request_most_like_the_one_under_way() -> None:
    earlier = Collection(4, SHAPE)
    assert not len(earlier)
    for matrix in (SWEET, np.zeros_like(SWEET), SOUR):
        earlier.add(matrix)
    assert len(earlier) == 2
    earlier.follow(0, np.array([1, 0, 1, 1, 0, 0]))  # cosines .41 and .82
    assert np.array_equal(earlier.nearest(), shares(SOUR))
    earlier.follow(1, np.array([0, 0, 5, 5, 0, 0]))  # and 1 and 0
    assert np.array_equal(earlier.nearest(), shares(SWEET))
    earlier.add(np.zeros_like(SWEET))
    assert np.array_equal(earlier.nearest(), shares(SWEET)), (
        "another is followed, and equals go by the earlier"
    )


def test_a_full_collection_joins_the_two_most_alike() -> None:
    earlier = Collection(2, SHAPE)
    for matrix in (SOUR, SWEET, SWEET + 1, SWEET + 2):
        earlier.add(matrix)
    assert len(earlier) == 2
    earlier.follow(0, SOUR[0])
    assert np.array_equal(earlier.nearest(), shares(SOUR)), "nothing was like it"
    earlier.follow(0, SWEET[0])
    assert np.array_equal(earlier.nearest(), shares(SWEET)), "it stands for three"


@pytest.mark.parametrize("seed", range(5))
def test_what_stays_is_what_a_slow_search_keeps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    coming = rng.integers(0, 4, (30, 3, 6)) + np.eye(6, dtype=int)[:3]
    earlier = Collection(5, SHAPE)
    kept = []
    for matrix in coming:
        earlier.add(matrix)
        kept.append([matrix, 1])
        if len(kept) > 5:
            pairs = [
                (_alike(kept[i][0], kept[j][0]), -i, -j) for i in range(len(kept)) for j in range(i)
            ]
            _, i, j = max(pairs)
            stays, goes = (-j, -i) if kept[-j][1] >= kept[-i][1] else (-i, -j)
            kept[stays][1] += kept[goes][1]
            kept[goes] = kept[-1]
            kept.pop()
    held = earlier._shares[: len(earlier)]
    assert np.allclose(held, [shares(matrix) for matrix, _ in kept])


def _alike(one: np.ndarray, other: np.ndarray) -> float:
    cosines = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
    return float(cosines.mean())


def test_the_match_is_prefetched_by_share_and_nearness() -> None:
    policy = prepared("prefetch", "activation:distance=2,overfetch=1")
    for layer in range(3):  # the first request is matched with its own matrix
        policy.propose(step([[0, 1], [0, 2]], layer=layer, phase=PREFILL, pass_index=0), Now())
    assert policy.propose(step([[0, 3]], pass_index=1), Now()).tolist() == [
        6,
        12,
        7,
        13,
    ]  # (.5, .25) x 3/4, x 2/4
    # Another request begins and uses new experts: the earlier request's layers are the best guess.
    coming = policy.propose(step([[4, 5]], layer=0, phase=PREFILL, pass_index=2), Now())
    assert coming.tolist() == [6, 12, 7, 13]


def test_what_the_request_uses_least_leaves_first() -> None:
    policy = prepared("eviction", "activation")
    for layer, selected in enumerate([[[0, 1]], [[0, 1]], [[0, 1], [0, 2]]]):
        keys = sorted({6 * layer + expert for row in selected for expert in row})
        policy.used(keys, step(selected, layer=layer, phase=PREFILL), Now(step=layer))
    keys = np.array([0, 2, 6, 12, 13, 14])
    order = np.lexsort(policy.order(keys, Now(step=3))[::-1])
    # Worth: .5, .001 of layer 0; .5 x 2/3; .5 / 3, .25 / 3, .25 / 3.
    assert keys[order].tolist() == [2, 13, 14, 12, 6, 0]


def test_before_any_request_begins_later_layers_leave_first() -> None:
    policy = prepared("eviction", "activation")
    policy.used([1], step([[1, 1]]), Now(step=0))  # a replay that starts in the middle
    keys = np.array([0, 1, 6, 12])
    assert keys[np.lexsort(policy.order(keys, Now(step=1))[::-1])].tolist() == [12, 6, 0, 1]


@pytest.mark.parametrize("option", ["distance=0", "overfetch=0", "capacity=0", "capacity=9999"])
def test_parameters_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(BadUsage, match="activation needs"):
        parse("prefetch", f"activation:{option}")
    with pytest.raises(BadUsage, match="at least 1, not 0"):
        Collection(0, SHAPE)
