"""Every format is measured beside bfloat16, at each shape."""

import pytest
import torch

from tools.bench import published
from tools.bench.published import measure, plain_expert, sheet
from tools.bench.stored_matrices import random_expert, variants


def test_figures_of_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "COLD_NBYTES", 1 << 16)
    result = measure("AWQ", variants(32)["AWQ"], [(256, 128), (64, 128)], rounds=2)
    assert set(result.ratios) == {(256, 128), (64, 128)} and min(result.ratios.values()) > 0
    layout, _ = random_expert(variants(32)["AWQ"], 64, 128, torch.bfloat16)
    assert result.bits == 16 * layout.nbytes / plain_expert(64, 128)[0].nbytes
    whole = measure("float16", None, [(64, 128)], rounds=2, dtype=torch.float16)
    assert whole.bits == 16 and whole.ratios[64, 128] > 0
    assert len(sheet([result], rounds=2).rows) == 1
