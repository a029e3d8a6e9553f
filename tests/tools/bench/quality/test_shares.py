"""What shares lose: a ratio with its error, and layers weighed in another way."""

import numpy as np
import pytest

from artifacts.quantisation.replicas import Replicas
from artifacts.quantisation.widths import WIDTHS, columns_of
from tools.bench.quality import shares


def test_a_ratio_and_its_error_are_those_of_sequences() -> None:
    assert shares._ratio(np.array([[0.0, 10], [0.0, 30]])) == (1.0, 0.0)
    ratio, error = shares._ratio(np.array([[1.0, 10], [3.0, 10]]))
    assert ratio == pytest.approx(np.exp(0.2)) and error == pytest.approx(ratio * np.sqrt(2) / 20)


def test_a_layer_that_counts_more_gets_the_bits() -> None:
    lost = np.full((2, 2, len(WIDTHS)), np.nan)
    lost[..., columns_of([0.6, 2])] = [1.0, 0.1]
    replicas = Replicas({0.6: 10, 2: 30, 16: 300}, lost, lost, np.ones((2, 2)))
    for weight, expected in (([3.0, 1.0], [2, 2, 0.6, 0.6]), ([1.0, 3.0], [0.6, 0.6, 2, 2])):
        bits = shares.chosen(replicas, np.array(weight)[:, None, None], 80)
        assert bits.tolist() == expected
