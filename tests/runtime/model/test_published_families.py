"""Families in the formats in which they are published: equal to the bit, fused within bounds,
counted as their replays. Configs of multimodal ones name the format in the part that describes the
text model."""

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
from runtime.session.settings import EXACT, FUSED
from tests.helpers import gguf_files
from tests.helpers.published import publish
from tests.runtime.backends.test_cpu_backend import TOLERANCE, decoded
from tests.runtime.model.test_families import offloaded, reference, save
from tests.runtime.model.test_quantised_tensor import CASES
from tests.runtime.replay.test_replay import live_and_replayed
from tools.make.families import PUBLISHED, tiny

pytestmark = pytest.mark.slow

WIDER = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "v_head_dim": 16,
}  # groups of 32
PAIRS = [(method, family) for method, families in PUBLISHED.items() for family in families]
FORMATS_AND_FAMILIES = [*PAIRS, *(("gguf", family) for family in gguf_files.ARCHITECTURES)]
OF_EACH_FORMAT = [
    *{method: (method, family) for method, family in reversed(FORMATS_AND_FAMILIES)}.values()
]
FURTHER = 1.5  # how much further fused may lie from float32 than exact, both in 16 bits


def made(folder: Path, method: str, family: str) -> Path:
    """A checkpoint in this format, beside a plain one of the same numbers; of GGUF a file with
    layers of different types."""
    if method == "gguf":
        return gguf_files.write(
            family,
            folder / "model.gguf",
            gguf_files.IN_MXFP4 if family == "gpt_oss" else gguf_files.mixed,
        )
    plain = save(tiny(family, WIDER), folder / "plain", as_published=True)
    published = publish(plain, folder / "published", method)
    path = published / "config.json"
    config = json.loads(path.read_text())
    if "text_config" in config:
        config["text_config"]["quantization_config"] = config.pop("quantization_config")
        path.write_text(json.dumps(config))
    return published


@pytest.fixture(scope="module", params=FORMATS_AND_FAMILIES, ids="-".join)
def checkpoint_in_few_bits(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> str:
    return str(made(tmp_path_factory.mktemp("published"), *request.param))


@pytest.mark.parametrize(
    ("method", "family"), [pair for pair in PAIRS if pair[1] not in CASES[pair[0]]]
)
def test_logits_are_those_of_the_dequantised_model(
    tmp_path: Path, method: str, family: str
) -> None:
    published = made(tmp_path, method, family)
    expected = reference(tmp_path / "plain", tiny(family))
    assert not open_model(str(published)).store.layout.is_plain
    for ours in offloaded(published, ("on-demand", "near")):
        assert torch.equal(ours, expected)


def runs(checkpoint: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] of the same tokens, exact and fused."""
    opened = open_model(checkpoint, dtype=dtype)
    exact, fused = (decoded(opened, Settings(), experts=experts) for experts in (EXACT, FUSED))
    opened.store.close()
    return exact, fused


def test_fused_it_decodes_within_bounds(
    checkpoint_in_few_bits: str, request: pytest.FixtureRequest
) -> None:
    """What exact and fused differ by in 16 bits, up to 5 % of the largest logit in models so small,
    is rounding of both. The median of tokens counts, since a router that rounding tips selects
    other experts."""
    right, fused = runs(checkpoint_in_few_bits, torch.float32)
    assert 0 < (fused - right).abs().max() <= TOLERANCE[torch.float32] * right.abs().max()
    family = request.node.callspec.params["checkpoint_in_few_bits"][1]
    for dtype in (torch.bfloat16, torch.float16) if family == "mixtral" else (torch.bfloat16,):
        errors = [
            (rounded - right).norm(dim=1).median()
            for rounded in runs(checkpoint_in_few_bits, dtype)
        ]
        assert errors[1] <= FURTHER * errors[0], dtype


@pytest.mark.parametrize("checkpoint_in_few_bits", OF_EACH_FORMAT, ids="-".join, indirect=True)
def test_fused_it_counts_as_its_replay(checkpoint_in_few_bits: str, tmp_path: Path) -> None:
    # as most GPTQ and AWQ checkpoints name
    opened = open_model(checkpoint_in_few_bits, dtype=torch.float16)
    settings = Settings("horizon", budget="50%", experts=FUSED)
    with Session(opened, settings) as session:
        assert session.receipt()["experts_of_a_token"] == "fused"
    live, again = live_and_replayed(opened, settings, Artefacts(), tmp_path / "trace.parquet")
    opened.store.close()
    assert (
        np.array_equal(live.counters.passes, again.counters.passes)
        and live.counters.totals()["misses"] > 0
    )
    assert np.array_equal(live.cache.state, again.cache.state)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_a_multimodal_checkpoint_without_its_scales_is_refused(tmp_path: Path, family: str) -> None:
    published = made(tmp_path, "fp8", family)
    path = published / "model.safetensors"
    tensors = {
        name: tensor for name, tensor in load_file(path).items() if not name.endswith("_scale_inv")
    }
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(
        BadInput, match=r"is float8_e4m3fn without scales, quantised by fp8: download"
    ):
        open_model(str(published))


def test_every_tested_pair_is_listed() -> None:
    assert all(set(families) <= set(PUBLISHED[method]) for method, families in CASES.items())
