"""Families in the formats in which they are published; configs of multimodal ones name the format in the part that
describes the text model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from artifacts.errors import BadInput
from runtime.model.open import open_model
from runtime.policies.base import Artefacts
from runtime.session.session import Session, Settings
from runtime.session.settings import FUSED
from tests.helpers.published import publish
from tests.runtime.engine.test_output_cpu import TOLERANCE
from tests.runtime.model.test_families import logits, offloaded, reference, save
from tests.runtime.model.test_quantised_tensor import CASES
from tests.runtime.replay.test_replay import live_and_replayed
from tools.make.families import PUBLISHED, tiny

WIDER = {"hidden_size": 64, "moe_intermediate_size": 64, "v_head_dim": 16}  # groups of 32
PAIRS = [
    (method, family) for method, families in PUBLISHED.items() for family in families if family not in CASES[method]
]


def made(folder: Path, method: str, family: str) -> tuple[Path, Path, torch.Tensor]:
    """A plain checkpoint, the published one of the same numbers, and the logits of transformers."""
    model = tiny(family, WIDER)
    plain = save(model, folder / "plain", as_published=True)
    published = publish(plain, folder / "published", method)
    path = published / "config.json"
    config = json.loads(path.read_text())
    if "text_config" in config:
        config["text_config"]["quantization_config"] = config.pop("quantization_config")
        path.write_text(json.dumps(config))
    return published, plain, reference(plain, model)


@pytest.mark.parametrize(("method", "family"), PAIRS)
def test_logits_are_those_of_the_dequantised_model(tmp_path: Path, method: str, family: str) -> None:
    published, _, expected = made(tmp_path, method, family)
    assert not open_model(str(published)).store.layout.is_plain
    for ours in offloaded(published, ("on-demand", "near")):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(("method", "family"), PAIRS)
def test_fused_it_decodes_within_bounds_and_counts_as_its_replay(tmp_path: Path, method: str, family: str) -> None:
    published, *_ = made(tmp_path, method, family)
    opened = open_model(str(published), dtype=torch.float32)
    with Session(opened, Settings(budget="50%")):
        exact = logits(opened.model)
    settings = Settings("horizon", budget="50%", experts=FUSED)
    with Session(opened, settings) as session:
        assert (logits(opened.model) - exact).abs().max() <= TOLERANCE[torch.float32] * exact.abs().max()
        assert session.receipt()["experts_of_a_token"] == "fused"
    live, again = live_and_replayed(opened, settings, Artefacts(), tmp_path / "trace.parquet")
    opened.store.close()
    assert np.array_equal(live.counters.passes, again.counters.passes) and live.counters.totals()["misses"] > 0
    assert np.array_equal(live.cache.state, again.cache.state)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_a_multimodal_checkpoint_without_its_scales_is_refused(tmp_path: Path, family: str) -> None:
    published, *_ = made(tmp_path, "fp8", family)
    path = published / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.endswith("_scale_inv")}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"is float8_e4m3fn without scales, quantised by fp8: download"):
        open_model(str(published))


def test_every_tested_pair_is_listed() -> None:
    assert all(set(families) <= set(PUBLISHED[method]) for method, families in CASES.items())
