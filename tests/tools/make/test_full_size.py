"""Checkpoints in published layouts: transformers itself loads small ones, and moectl computes the
same."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from tools.make.full_size import entries, make
from tools.make.published_configs import CONFIGS
from tools.make.shards import Entry, write_shards

GPT_OSS = {
    "num_hidden_layers": 2,
    "num_local_experts": 8,
    "hidden_size": 128,
    "intermediate_size": 64,
}
QWEN = {"num_hidden_layers": 2, "num_experts": 16, "hidden_size": 256, "moe_intermediate_size": 256}
SMALL = {
    name: sizes | {"vocab_size": 300} for name, sizes in zip(CONFIGS, (GPT_OSS, QWEN), strict=True)
}
DEQUANTISED = {
    "gpt-oss-20b": Mxfp4Config(dequantize=True),
    "qwen3-30b-a3b-fp8": FineGrainedFP8Config(dequantize=True),
}
PUBLISHED = {
    "gpt-oss-20b": (459, 13_761_264_768),
    "qwen3-30b-a3b-fp8": (37_491, 31_170_000_000),
}  # tensors, bytes
IDS = torch.arange(3, 20)[None]


@pytest.mark.parametrize("model", CONFIGS)
def test_transformers_and_moectl_compute_the_same_finite_logits(model: str, tmp_path: Path) -> None:
    make(model, tmp_path, changes=SMALL[model])
    options = {
        "experts_implementation": "eager",
        "dtype": torch.bfloat16,
        "quantization_config": DEQUANTISED[model],
    }
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    with (
        Session(open_model(str(tmp_path)), Settings(budget="50%")) as session,
        torch.inference_mode(),
    ):
        ours = session.forward(IDS).logits
        assert torch.equal(ours, theirs(IDS).logits) and ours.isfinite().all()


@pytest.mark.parametrize(
    ("model", "gigabytes", "count"),
    [("gpt-oss-20b", 13.76, 459), ("qwen3-30b-a3b-fp8", 31.18, 37491)],
)
def test_the_published_size_is_that_of_the_published_files(
    model: str, gigabytes: float, count: int
) -> None:
    tensors = list(entries(CONFIGS[model]({})))
    assert len(tensors) == len({tensor.name for tensor in tensors}) == count
    assert sum(tensor.nbytes for tensor in tensors) / 1e9 == pytest.approx(gigabytes, abs=0.01)


def test_shards_hold_as_much_as_fits_and_the_index_names_them(tmp_path: Path) -> None:
    tensors = [Entry(name, "U8", (10,), "") for name in "cab"] + [Entry("d", "BF16", (3, 20), "")]
    nbytes = write_shards(
        tmp_path,
        tensors,
        lambda entry: iter([memoryview(entry.name.encode() * entry.nbytes)]),
        shard_nbytes=25,
    )
    assert nbytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert [index[name][:11] for name in "cabd"] == [
        "model-00001",
        "model-00001",
        "model-00002",
        "model-00003",
    ]
    with safe_open(tmp_path / index["d"], framework="pt") as file:
        assert file.get_tensor("d").view(torch.uint8).flatten().tolist() == [ord("d")] * 120
