"""What a model needs besides its experts: against published totals, and against real modules."""

import json
from pathlib import Path

import pytest
import torch

from artifacts.errors import BadInput
from artifacts.modelshapes.known import MODELS, model_shape
from artifacts.modelshapes.memory import backbone_memory, backbone_of, from_config
from tests.helpers import families

# Billions of parameters, as published with the checkpoints,
# without layers that predict further tokens.
TOTALS = {
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 140.6,
    "olmoe-1b-7b": 6.92,
    "qwen1.5-moe-a2.7b": 14.3,
    "qwen2-57b-a14b": 57.4,
    "deepseek-v2-lite": 15.7,
    "deepseek-v2": 235.7,
    "deepseek-v3": 671.0,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1,
    "qwen3-235b-a22b-fp8": 235.1,
    "qwen3-235b-a22b-gptq-int4": 235.1,
    "phi-3.5-moe": 41.9,
    "deepseek-v4-flash": 284.4,
    "deepseek-v4.1-flash": 552,
    "gemma-4-26b-a4b": 25.2,
    "glm-5.2": 744,
    "kimi-k3": 2780,
    "minimax-m3": 428,
    "qwen3-next-80b-a3b": 79.7,
    "qwen3.6-35b-a3b": 34.7,
    "qwen3.8-flash-next": 125.6,
}


@pytest.mark.parametrize("name", TOTALS)
def test_all_weights_together_are_the_published_total(name: str) -> None:
    model = MODELS[name]
    memory = backbone_memory(model, backbone_of(name))
    total = model.shape.nbytes / model.weight_nbytes + memory.weights_nbytes / model.dtype_nbytes
    assert total / 1e9 == pytest.approx(TOTALS[name], rel=0.005)


def test_every_model_of_the_table_has_a_backbone() -> None:
    for name, model in MODELS.items():
        memory = backbone_memory(model, backbone_of(name))
        assert 0 < memory.cache_nbytes < memory.weights_nbytes < 120e9, name
    assert (
        backbone_memory(MODELS["mixtral-8x7b"], backbone_of("mixtral-8x7b")).cache_nbytes
        == 32 * 2 * 8 * 128 * 2
    )
    assert (
        backbone_memory(MODELS["deepseek-v3"], backbone_of("deepseek-v3")).cache_nbytes
        == 61 * (512 + 64) * 2
    )


@pytest.mark.parametrize("family", families.FAMILIES)
def test_real_modules_and_caches(family: str, tmp_path: Path) -> None:
    """Weights agree but for norms and biases, which count in so small a model; the cache agrees to
    the byte."""
    config, model = families.FAMILIES[family]()
    config.save_pretrained(tmp_path)
    shape = model_shape(str(tmp_path))
    memory = backbone_memory(shape, from_config(tmp_path / "config.json"))
    wide = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if tensor.dim() > 1 and "experts." not in name
    }
    shared = {
        name: tensor for name, tensor in model.state_dict().items() if "shared_expert" in name
    }
    distinct = {tensor.data_ptr(): tensor.nbytes for tensor in (wide | shared).values()}
    per_weight = 4 / shape.dtype_nbytes  # the test's modules are float32
    assert memory.weights_nbytes * per_weight == pytest.approx(sum(distinct.values()), rel=0.03)
    cache = model(torch.ones(1, 5, dtype=torch.long), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert memory.cache_nbytes * 5 * 4 / shape.dtype_nbytes == held


def test_a_config_that_says_too_little(tmp_path: Path) -> None:
    config, _ = families.FAMILIES["olmoe"]()
    fields = config.to_dict()
    del fields["num_attention_heads"]
    (tmp_path / "config.json").write_text(json.dumps(fields, default=str))
    with pytest.raises(BadInput, match="num_attention_heads"):
        backbone_of(str(tmp_path))
