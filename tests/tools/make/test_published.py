"""Checkpoints that are rounded into published layouts: opened, near the original, in shards as it was."""

from pathlib import Path

import pytest
import torch

from artifacts.formats.table import quantisation_of
from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from tests.helpers import families
from tools.make.published import FORMATS, publish

IDS = torch.arange(3, 20)[None]


@pytest.mark.parametrize(
    ("name", "says", "most"), [("fp8", "fp8, 8.08 bits", 0.03), ("mxfp4", "mxfp4, 4.25 bits", 0.13)]
)
def test_a_checkpoint_in_few_bits_computes_nearly_the_same(name: str, says: str, most: float, tmp_path: Path) -> None:
    fields = {"hidden_size": 64, "moe_intermediate_size": 96}
    plain = families.save("qwen3_moe", "hub", tmp_path / "plain", torch.float32, "40KB", fields)
    numbers = publish(plain, tmp_path / "published", *FORMATS[name])
    opened = open_model(str(tmp_path / "published"))
    assert opened.expert_format == says and len(numbers) == 3 * opened.shape.num_keys
    logits = []
    for each in (opened, open_model(str(plain))):
        with Session(each, Settings()) as session, torch.inference_mode():
            logits.append(session.forward(IDS).logits)
    difference = (logits[0] - logits[1]).norm() / logits[1].norm()
    assert 0 < difference < 3 * most


@pytest.mark.parametrize(("name", "most"), [("fp8", 0.03), ("mxfp4", 0.13), ("int4", 0.1)])
def test_each_matrix_is_rounded_to_the_nearest(name: str, most: float) -> None:
    """No other number that its group has is nearer to a weight."""
    config, encode = FORMATS[name]
    form = quantisation_of({"quantization_config": config}).spellings[0].format
    matrix = torch.randn(160, 96, generator=torch.Generator().manual_seed(0))
    rounded = form.dequantise(encode(matrix))
    assert 0 < (rounded - matrix).norm() / matrix.norm() < most
    values = rounded.reshape(160, -1, 32)
    nearest = (matrix.reshape(160, -1, 32, 1) - values[:, :, None]).abs().min(dim=3).values
    assert ((matrix - rounded).abs().reshape(160, -1, 32) <= nearest + 1e-6).all()
