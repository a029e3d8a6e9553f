"""Every format is measured beside bfloat16, at each shape."""

from functools import partial

import pytest
import torch

from tools.bench.kernels import published
from tools.bench.kernels.published import measure, random_replica, sheet
from tools.bench.kernels.stored_matrices import plain_expert, random_expert, variants


def test_figures_of_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "COLD_NBYTES", 1 << 16)
    make = partial(random_expert, variants(32)["AWQ"], dtype=torch.bfloat16)
    result = measure("AWQ", make, [(256, 128), (64, 128)], rounds=2)
    assert set(result.ratios) == {(256, 128), (64, 128)} and min(result.ratios.values()) > 0
    layout, _ = make(64, 128)
    assert result.bits == 16 * layout.nbytes / plain_expert(64, 128)[0].nbytes
    make = partial(plain_expert, dtype=torch.float16)
    whole = measure("float16", make, [(64, 128)], rounds=2, dtype=torch.float16)
    assert whole.bits == 16 and whole.ratios[64, 128] > 0
    assert len(sheet([result], rounds=2).rows) == 1


def test_figures_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "COLD_NBYTES", 1 << 16)
    result = measure("8 bits", partial(random_replica, 8), [(256, 128)], rounds=2)
    assert (
        result.bits == pytest.approx(8 + (16 + 8) / 128, rel=1e-3) and result.ratios[256, 128] > 0
    )
