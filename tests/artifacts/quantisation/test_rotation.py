"""Rotations: orthonormal for every length, and the same numbers everywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.quantisation.trellis.rotation import factors, rotate, rotate_back


@given(st.integers(1, 100))
def test_a_rotation_is_orthonormal_and_is_undone(length: int) -> None:
    rotation = rotate(np.eye(length, dtype=np.float32))
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(length), atol=3e-6)
    np.testing.assert_allclose(rotate_back(rotation), np.eye(length), atol=3e-6)


@pytest.mark.parametrize("length", [64, 96, 704])
def test_one_large_number_is_spread(length: int) -> None:
    m, _ = factors(length)
    spread = rotate(np.eye(length, dtype=np.float32)[:1])
    assert np.abs(spread).max() <= np.sqrt((1 if m == 1 else 2) / length) * 1.001


def test_numbers_are_fixed() -> None:
    spread = rotate(np.arange(96, dtype=np.float32))
    assert [spread[0], spread[40], spread[95]] == [
        -76.34242248535156,
        29.499998092651367,
        -95.2627944946289,
    ]
