"""What is measured beside each other computes the same, and every figure is there."""

import pytest
import torch
from torch.nn import functional as F

from artifacts.quantisation.widths import SCALAR_WIDTHS
from runtime.kernels.low_bit import dequantise
from tools.bench.kernels import low_bit
from tools.bench.kernels.low_bit import (
    CONTENDERS,
    Contender,
    contenders,
    conversion,
    measure,
    sheet,
)
from tools.gpu.checks.low_bit import random_packed


@pytest.mark.parametrize(
    ("bits", "contender"),
    [(bits, each) for bits in SCALAR_WIDTHS for each in contenders(bits)],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_contender_computes_the_product(contender: Contender, bits: int) -> None:
    packed = random_packed(64, 256, bits)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = F.linear(x.float(), dequantise(packed))
    ours = contender.multiply(x, contender.prepare(packed))
    assert ((ours.float() - exact).norm() / exact.norm()).item() < 5e-3


def test_figures_of_every_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_bit, "TURN_S", 0.0)
    monkeypatch.setattr(low_bit, "COLD_NBYTES", 1 << 16)
    results = [
        own
        for cold in (False, True)
        for own in measure((32, 64), 3, [1, 2], is_cold=cold, rounds=2)
    ]
    assert [(own.tokens, own.is_cold) for own in results] == [
        (1, False),
        (2, False),
        (1, True),
        (2, True),
    ]
    assert all(
        set(own.ratios) == {each.name for each in CONTENDERS} and own.ratios["bfloat16"] == 1
        for own in results
    )
    assert len(sheet(results, rounds=2).rows) == 4
    assert "bits a weight in memory" in conversion((32, 64), 3)
