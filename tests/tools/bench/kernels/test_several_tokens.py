"""Every form of experts is measured beside torch, on every number of tokens."""

import pytest

from tools.bench.kernels import several_tokens
from tools.bench.kernels.several_tokens import expert, ratios, sheet


def test_figures_of_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_tokens, "COLD_NBYTES", 1 << 16)
    names = ("bfloat16", "float16", "float32", "AWQ")
    shape = (256, 128)
    measured = {name: ratios(*expert(name, *shape), shape, [1, 3], rounds=2) for name in names}
    assert all(set(found) == {1, 3} and min(found.values()) > 0 for found in measured.values())
    assert len(sheet(measured, shape, rounds=2).rows) == len(names)
