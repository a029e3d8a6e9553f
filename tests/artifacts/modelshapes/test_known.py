"""Shapes of named models against their published sizes, and shapes read from configs."""

import json
from pathlib import Path

import pytest

from artifacts.errors import BadInput, BadUsage
from artifacts.modelshapes.known import MODELS, from_config, guessed, model_shape, unsized
from artifacts.shape import Shape

# Billions of parameters in total, as published.
PUBLISHED = {
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 141,
    "olmoe-1b-7b": 6.9,
    "qwen1.5-moe-a2.7b": 14.3,
    "qwen2-57b-a14b": 57.4,
    "deepseek-v2-lite": 15.7,
    "deepseek-v2": 236,
    "deepseek-v3": 671,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "qwen3-235b-a22b-fp8": 235,
    "qwen3-235b-a22b-gptq-int4": 235,
    "phi-3.5-moe": 41.9,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "qwen3-next-80b-a3b": 80,
    "qwen3.6-35b-a3b": 35,
    "qwen3.8-flash-next": 125,
    "deepseek-v4-flash": 284,
    "deepseek-v4.1-flash": 552,
    "glm-5.2": 744,
    "glm-5.3-flash": 320,
    "gemma-4-26b-a4b": 25.2,
    "minimax-m3": 428,
    "kimi-k3": 2780,
}


@pytest.mark.parametrize("name", MODELS)
def test_routed_experts_are_most_of_what_is_published(name: str) -> None:
    model = model_shape(name)
    assert 0.85 < model.shape.nbytes / model.weight_nbytes / 1e9 / PUBLISHED[name] < 1


@pytest.mark.parametrize(
    ("config", "layers", "experts", "nbytes", "shared"),
    [
        ({"num_local_experts": 8, "intermediate_size": 10}, 6, 8, 3 * 4 * 10 * 2, 0),
        ({"num_experts": 8, "intermediate_size": 10, "dtype": "float32"}, 6, 8, 3 * 4 * 10 * 4, 0),
        (
            {
                "n_routed_experts": 9,
                "moe_intermediate_size": 5,
                "n_shared_experts": 2,
                "first_k_dense_replace": 1,
            },
            *(5, 9, 3 * 4 * 5 * 2, 3 * 4 * 10 * 2),
        ),
        (
            {
                "num_experts": 8,
                "moe_intermediate_size": 5,
                "decoder_sparse_step": 2,
                "mlp_only_layers": [1],
            },
            *(2, 8, 3 * 4 * 5 * 2, 0),
        ),
        (
            {
                "num_local_experts": 8,
                "intermediate_size": 5,
                "shared_intermediate_size": 7,
                "moe_layer_freq": [0, 1, 1, 0, 1, 1],
            },
            *(4, 8, 3 * 4 * 5 * 2, 3 * 4 * 7 * 2),
        ),
        (
            {"num_experts": 8, "moe_intermediate_size": 5, "shared_expert_intermediate_size": 7},
            *(6, 8, 3 * 4 * 5 * 2, 3 * 4 * 7 * 2),
        ),
    ],
)
def test_configs(
    tmp_path: Path, config: dict, layers: int, experts: int, nbytes: int, shared: int
) -> None:
    common = {"num_hidden_layers": 6, "hidden_size": 4, "num_experts_per_tok": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(common | config))
    model = model_shape(str(tmp_path))
    assert model.shape == Shape(layers, experts, 2, nbytes)
    assert (model.hidden, model.vocabulary, model.shared_nbytes) == (4, 100, shared)
    (tmp_path / "nested.json").write_text(json.dumps({"text_config": common | config}))
    assert from_config(tmp_path / "nested.json").shape == model.shape


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read"),
        ("[]", "has no hidden_size"),
        ('{"hidden_size": 4}', "no config of a Mixture-of-Experts"),
    ],
)
def test_what_is_no_config(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadInput, match=says):
        model_shape(str(tmp_path))


def test_an_unknown_name_is_answered_with_a_guess() -> None:
    with pytest.raises(BadUsage, match="unknown model 'mixtral'; did you mean mixtral-8x7b"):
        model_shape("mixtral")


def test_a_shape_alone_makes_a_model_with_notes() -> None:
    model = unsized(8, 32, 4)
    assert (model.shape.expert_nbytes, model.hidden) == (12 * 2**20, 2048)
    assert len(model.assumed) == 2 and len(guessed(model.shape).assumed) == 1
