"""Scores for buddy lists, and merged samples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.routing.buddies import buddy_lists
from artifacts.routing.similarity import Similarity, loss_scores, output_scores


def matrix(seed: int, num_experts: int) -> np.ndarray:
    return np.random.default_rng(seed).random((num_experts, num_experts))


@given(st.integers(0, 10**6), st.integers(2, 9))
@settings(max_examples=100)
def test_scores_are_shares_in_the_order_of_their_metric(seed: int, num_experts: int) -> None:
    values = matrix(seed, num_experts)
    for q, price in ((output_scores(2 * values - 1), -values), (loss_scores(values), values)):
        assert np.allclose(q.sum(axis=1), 1) and not q.diagonal().any()
        lists = buddy_lists(q, 1.0, num_experts)
        for pivot, buddies in enumerate(lists):
            peers = [int(peer) for peer in np.argsort(price[pivot], kind="stable") if peer != pivot]
            assert buddies == peers[: len(buddies)] and len(buddies) == len(peers)


def test_a_twin_covers_everything() -> None:
    loss = np.array(
        [[0.0, 0.0, 2.0, 3.0], [0.0, 0.0, 2.0, 3.0], [2.0, 2.0, 0.0, 1.0], [3.0, 3.0, 1.0, 0.0]]
    )
    lists = buddy_lists(loss_scores(loss), 0.95, 3)
    assert lists[:2] == [[1], [0]] and lists[2] == [3, 0, 1]
    assert np.isfinite(loss_scores(np.zeros((3, 3)))).all()


def test_one_expert_and_opposite_experts_have_no_buddies() -> None:
    assert (
        loss_scores(np.zeros((1, 1))).tolist() == output_scores(np.ones((1, 1))).tolist() == [[0.0]]
    )
    assert output_scores(np.array([[1.0, -1.0], [-1.0, 1.0]])).tolist() == [[0, 0], [0, 0]]


def test_samples_count_by_their_tokens() -> None:
    """Expert 1 borrowed tokens in the first sample only, expert 2 in both."""

    def sample(cosine: float, loss: float, samples: list[int]) -> Similarity:
        size = (1, 3, 3)
        return Similarity(
            np.full(size, cosine), np.full(size, loss), np.full(size[:2], loss), np.array([samples])
        )

    merged = Similarity.merge([sample(0.0, 1.0, [2, 0, 0]), sample(1.0, 4.0, [4, 2, 0])])
    assert merged.cosine[0, 0, 1] == pytest.approx(6 / 8)
    assert merged.loss[0, :, 0].tolist() == pytest.approx([3.0, 4.0, (2 * 1 + 6 * 4) / 8])
    assert merged.left_out[0].tolist() == pytest.approx(merged.loss[0, :, 0].tolist())
    assert merged.samples.tolist() == [[6, 2, 0]]
