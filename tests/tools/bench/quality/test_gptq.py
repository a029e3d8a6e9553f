"""The benchmark of the solver: its arithmetic, and one run of its rows at a shape of nothing."""

import argparse

import pytest

from tools.bench.quality import gptq
from tools.bench.quality.gptq import Cost, Expert, ratio_row, scaled_row


def test_costs_grow_with_inputs_tokens_and_rows() -> None:
    cost = Cost(token_s=1e-6, factor_s=0.5, row_s=1e-3)
    assert cost.total(1000, 100) == pytest.approx(0.001 + 0.5 + 0.1)
    assert cost.scaled(2).total(1000, 100) == pytest.approx(0.004 + 4 + 0.4)


def test_rows_of_both_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "LARGEST_ROWS", 8)
    monkeypatch.setattr(gptq, "LARGEST_TOKENS", 16)
    shape = Expert(hidden=32, intermediate=32, num_experts=2, tokens=16)
    row = ratio_row("small", shape, argparse.Namespace(rounds=2, recipe="refined"))
    assert row[:2] == ("small", "16") and float(row[4]) > 0
    assert scaled_row("small", shape, "plain")[3] == "2"
