"""Experts in a published format computed where they lie: close to the model's own code, and counted
alike."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from moectl.shared.opening import settled
from runtime.model.open import MoeModel, open_model
from runtime.policies.base import Artefacts
from runtime.session.session import Session, Settings
from runtime.session.settings import EXACT, FUSED
from tests.helpers import families, gguf_files
from tests.helpers.gguf_files import BY_PROJECTION, mixed
from tests.helpers.published import publish
from tests.runtime.backends.test_cpu_backend import TOLERANCE, decoded
from tests.runtime.replay.test_replay import live_and_replayed

SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96}
METHODS = {
    "fp8": "qwen3_moe",
    "compressed-tensors": "deepseek_v2",
    "gptq": "qwen2_moe",
    "awq": "mixtral",
    "nvfp4": "qwen3_moe",
    "mxfp4": "gpt_oss",
}


def published(method: str, folder: Path) -> Path:
    """A small model in this format; GGUF's has layers of different types."""
    if method == "gguf":
        return gguf_files.write("qwen3_moe", folder / "model.gguf", mixed)
    family = METHODS[method]
    has_one_size = family in ("mixtral", "gpt_oss")
    fields = {
        name: size
        for name, size in SIZES.items()
        if not has_one_size or name != "moe_intermediate_size"
    }
    plain = families.save(family, "hub", folder / "plain", torch.float32, fields=fields)
    return publish(plain, folder / "published", method)


@pytest.fixture(scope="module", params=[*METHODS, "gguf"])
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MoeModel]:
    opened = open_model(
        str(published(request.param, tmp_path_factory.mktemp("published"))), dtype=torch.float32
    )
    yield opened
    opened.store.close()


@pytest.mark.parametrize(
    "settings", [Settings(preset="near"), Settings(preset="specmd", link="100MB/s+20us")]
)
def test_decoding_gives_the_logits_of_torch(opened: MoeModel, settings: Settings) -> None:
    fused = decoded(opened, settings, experts=FUSED)
    exact = decoded(opened, Settings())
    assert (fused - exact).abs().max() <= TOLERANCE[torch.float32] * exact.abs().max()
    assert (fused.argmax(dim=1) == exact.argmax(dim=1)).all()


def test_it_counts_as_torch(opened: MoeModel, tmp_path: Path) -> None:
    runs = []
    for experts in (EXACT, FUSED):
        torch.manual_seed(0)  # of the batch
        settings = Settings(budget="50%", experts=experts)
        runs.append(live_and_replayed(opened, settings, Artefacts(), tmp_path / "trace.parquet")[0])
    exact, fused = runs
    assert (
        np.array_equal(fused.counters.passes, exact.counters.passes)
        and fused.counters.totals()["misses"] > 0
    )
    assert np.array_equal(fused.cache.state, exact.cache.state)


def test_layers_without_kernels_are_dequantised_and_the_others_multiplied(tmp_path: Path) -> None:
    """The first of two layers has gate in IQ1_S."""
    path = gguf_files.write("qwen3_moe", tmp_path / "model.gguf", BY_PROJECTION)
    opened = open_model(str(path), dtype=torch.float32)
    fused = decoded(opened, Settings("near"), experts=FUSED)
    exact = decoded(opened, Settings())
    assert (fused - exact).abs().max() <= TOLERANCE[torch.float32] * exact.abs().max()
    line = "experts of 1 of 2 layers (IQ1_S and IQ1_M and IQ2_XXS) have no kernels: one at a time"
    found = settled(opened, Settings("near", budget="50%", experts="auto"), None)
    assert line in found.told[0] and found.settings.experts == FUSED
    with Session(opened, found.settings) as session:
        assert any(line in each for each in session.receipt()["fallbacks"])
