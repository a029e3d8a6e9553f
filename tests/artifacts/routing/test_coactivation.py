"""Coactivation against a plain count over tokens, and its exactness under any order of merging."""

from collections import Counter
from fractions import Fraction
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.routing.coactivation import Coactivation, NotFiniteWeights, conditional


def routed(seed, num_tokens, num_experts=6, top_k=3):
    """Random selections [T, k] without repeats, and weights [T, k]."""
    random = np.random.default_rng(seed)
    selected = np.argsort(random.random((num_tokens, num_experts)), axis=1)[:, :top_k]
    return selected, random.random((num_tokens, top_k)).astype(np.float32)


def counted(selected, weights, num_experts):
    statistics = Coactivation(num_experts)
    statistics.update(selected, weights)
    return statistics


def everything(statistics):
    return [statistics.pairs, statistics.weighted]


@given(st.integers(0, 10_000), st.integers(0, 12), st.integers(1, 4))
def test_equals_a_plain_count(seed, num_tokens, top_k):
    selected, weights = routed(seed, num_tokens, top_k=top_k)
    both = Counter()
    lesser = Counter()
    for experts, row in zip(selected.tolist(), weights.tolist(), strict=True):
        share = {
            expert: Fraction(value) / sum(map(Fraction, row))
            for expert, value in zip(experts, row, strict=True)
        }
        for pair in combinations(experts, 2):
            for i, j in permutations(pair):
                both[i, j] += 1
                lesser[i, j] += min(share[i], share[j])
    statistics = counted(selected, weights, 6)
    assert statistics.pairs.tolist() == [[both[i, j] for j in range(6)] for i in range(6)]
    # Each term is rounded to the nearest 2^-24.
    error = (num_tokens + 1) * 2**-24
    expected = [[float(lesser[i, j]) for j in range(6)] for i in range(6)]
    np.testing.assert_allclose(statistics.weighted, expected, rtol=0, atol=error)


@pytest.mark.parametrize("parts", [1, 2, 7, 400])
def test_shards_merge_to_the_same_bits_in_any_order(parts):
    selected, weights = routed(1, 400, num_experts=32, top_k=8)
    whole = counted(selected, weights, 32)
    shards = [counted(selected[i::parts], weights[i::parts], 32) for i in range(parts)]
    for order in (
        range(parts),
        reversed(range(parts)),
        np.random.default_rng(2).permutation(parts),
    ):
        merged = Coactivation(32)
        for shard in order:
            merged.merge(shards[shard])
        for left, right in zip(everything(merged), everything(whole), strict=True):
            assert np.array_equal(left, right)


def test_memory_layout_does_not_matter():
    selected, weights = routed(1, 50, num_experts=32, top_k=8)
    plain = counted(selected, weights, 32)
    other = counted(np.asfortranarray(selected), np.asfortranarray(weights), 32)
    assert all(
        np.array_equal(left, right)
        for left, right in zip(everything(plain), everything(other), strict=True)
    )


def test_matrices_are_symmetric_without_a_diagonal():
    statistics = counted(*routed(3, 100), 6)
    for matrix in (statistics.pairs, statistics.weighted):
        assert np.array_equal(matrix, matrix.T)
        assert not matrix.diagonal().any()
    assert statistics.pairs.dtype == np.int64


def test_a_token_whose_weights_are_all_zero_counts_in_equal_shares():
    statistics = counted(np.array([[0, 1]]), np.zeros((1, 2)), 2)
    assert statistics.weighted[0, 1] == 0.5


def test_our_own_mistakes_are_caught():
    with pytest.raises(AssertionError, match="outside"):
        counted(np.array([[0, -1]]), np.ones((1, 2)), 4)


def test_an_expert_that_is_named_twice_is_no_pair():
    statistics = counted(np.array([[2, 2, 1]]), np.ones((1, 3)), 4)
    assert not statistics.pairs.diagonal().any() and not statistics.weighted.diagonal().any()
    assert statistics.pairs[1, 2] == 2


@pytest.mark.parametrize("weight", [np.nan, np.inf, -0.5])
def test_weights_that_are_none_are_an_error_of_the_model(weight: float):
    with pytest.raises(NotFiniteWeights, match="a router gives NaN"):
        counted(np.array([[0, 1]]), np.array([[0.5, weight]]), 2)


@given(st.integers(2, 5), st.data(), st.sampled_from([0.0, 0.25, 1.0]))
def test_conditional_equals_its_formula(num_experts, data, epsilon):
    row = st.lists(st.integers(0, 3), min_size=num_experts, max_size=num_experts)
    pairs = np.array(data.draw(st.lists(row, min_size=num_experts, max_size=num_experts)))
    q = conditional(pairs, epsilon)
    for i in range(num_experts):
        others = [j for j in range(num_experts) if j != i]
        total = sum(pairs[i, j] + epsilon for j in others)
        is_active = any(pairs[i, j] for j in others)
        for j in range(num_experts):
            expected = (pairs[i, j] + epsilon) / total if is_active and j != i else 0.0
            assert q[i, j] == pytest.approx(expected, abs=1e-15)
