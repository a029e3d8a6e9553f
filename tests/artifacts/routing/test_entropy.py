"""Token activating entropy, and percentiles from its additive histogram."""

import math

import numpy as np
import pytest

from artifacts.routing.entropy import EntropyHistogram, token_entropy


def test_equals_its_formula():
    weights = np.random.default_rng(0).random((20, 4))
    expected = [
        -sum(w / row.sum() * math.log(w / row.sum()) for w in row) / math.log(4) for row in weights
    ]
    assert token_entropy(weights).tolist() == pytest.approx(expected, abs=1e-12)


def test_its_ends():
    assert token_entropy(np.array([[0.3]])).tolist() == [0.0]
    assert token_entropy(np.array([[1.0, 0.0], [0.2, 0.2]])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_temperature_divides_the_logits(temperature):
    logits = np.random.default_rng(0).normal(size=(20, 4))
    tempered = token_entropy(np.exp(logits / temperature))
    np.testing.assert_allclose(
        token_entropy(np.exp(logits), temperature=temperature), tempered, atol=1e-12
    )


def test_percentiles_are_near_the_true_ones():
    values = np.random.default_rng(0).beta(2, 5, size=50_000)
    histogram = EntropyHistogram()
    histogram.update(values)
    np.testing.assert_allclose(
        histogram.percentiles(), np.percentile(values, range(101)), atol=1e-3
    )


def test_shards_merge_to_the_same_percentiles():
    values = token_entropy(np.random.default_rng(0).random((500, 8)))
    whole = EntropyHistogram()
    merged = EntropyHistogram()
    whole.update(values)
    for start in range(0, 500, 3):
        shard = EntropyHistogram()
        shard.update(values[start : start + 3])
        merged.merge(shard)
    assert np.array_equal(whole.counts, merged.counts)
    assert whole.percentiles().dtype == np.float32


def test_values_at_the_ends_stay_in_range():
    histogram = EntropyHistogram()
    histogram.update(np.array([0.0, 0.0, 1.0, 1.0]))
    percentiles = histogram.percentiles()
    assert percentiles[0] == 0.0 and percentiles[100] == 1.0
    assert (np.diff(percentiles) >= 0).all()
