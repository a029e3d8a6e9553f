"""The figures of trellis codes: bits are counted whole, and distortion lies between the limit and a
scalar code's."""

import pytest

from tools.bench.quality import encoding


def test_distortion_lies_between_the_limit_and_the_best_scalar_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoding, "SHAPE", (256, 16))
    bits, error = encoding.distortion(2.1)
    assert 2 < bits <= 2.1 and 4.0**-bits < error < encoding.LLOYD_MAX[2]
