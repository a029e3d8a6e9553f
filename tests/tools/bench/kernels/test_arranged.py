"""Reading an expert and putting its codes into order are timed apart."""

import pytest

from tools.bench.kernels import arranged
from tools.bench.kernels.arranged import measure, sheet
from tools.bench.kernels.stored_matrices import variants


def test_figures_of_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arranged, "COLD_NBYTES", 1 << 16)
    name = "GPTQ, 4 bits, desc_act"
    result = measure(name, variants(32)[name], 128, 64, rounds=3)
    assert min(result.read_ms, result.arrange_ms) > 0 and result.nbytes > 128 * 64 * 3 // 2
    assert len(sheet([result], 128, 64, rounds=3).rows) == 1
