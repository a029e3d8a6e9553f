"""Checkpoints that are rounded into published layouts: opened, each number the nearest that there
is."""

from pathlib import Path

import pytest
import torch

from artifacts.formats.stated import stated_quantisation
from runtime.model.layout import aligned
from runtime.model.open import open_model
from tests.helpers import families
from tools.make.published import FORMATS, experts_in, publish


@pytest.mark.parametrize(
    ("name", "says"), [("fp8", "fp8, 8.08 bits"), ("mxfp4", "mxfp4, 4.25 bits")]
)
def test_a_checkpoint_in_shards_opens_with_the_rounded_numbers(
    name: str, says: str, tmp_path: Path
) -> None:
    fields = {"hidden_size": 64, "moe_intermediate_size": 96}
    plain = families.save("qwen3_moe", "hub", tmp_path / "plain", torch.float32, "40KB", fields)
    numbers = publish(plain, tmp_path / "published", *experts_in(name))
    opened = open_model(str(tmp_path / "published"))
    assert opened.expert_format == says and len(numbers) == 3 * opened.shape.num_keys
    layout = opened.store.layout
    buffer = aligned(layout.nbytes)
    opened.store.read(0, 3, buffer)
    gate, up, down = (
        numbers[f"model.layers.0.mlp.experts.3.{part}_proj.weight"]
        for part in ("gate", "up", "down")
    )
    weights = layout.weights(buffer)
    assert torch.equal(weights["gate_up_proj"], torch.cat([gate, up])) and torch.equal(
        weights["down_proj"], down
    )


@pytest.mark.parametrize(("name", "most"), [("fp8", 0.03), ("mxfp4", 0.13), ("int4", 0.1)])
def test_each_matrix_is_rounded_to_the_nearest(name: str, most: float) -> None:
    """No other number that its group has is nearer to a weight."""
    config, encode = FORMATS[name]
    form = stated_quantisation({"quantization_config": config}).spellings[0].format
    matrix = torch.randn(160, 96, generator=torch.Generator().manual_seed(0))
    rounded = form.dequantise(encode(matrix))
    assert 0 < (rounded - matrix).norm() / matrix.norm() < most
    values = rounded.reshape(160, -1, 32)
    nearest = (matrix.reshape(160, -1, 32, 1) - values[:, :, None]).abs().min(dim=3).values
    assert ((matrix - rounded).abs().reshape(160, -1, 32) <= nearest + 1e-6).all()
