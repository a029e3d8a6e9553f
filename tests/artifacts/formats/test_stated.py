"""What a config.json says of its quantisation."""

import re
import time
from pathlib import Path

import pytest
import torch

from artifacts.errors import BadInput
from artifacts.formats.stated import METHODS, MODELOPT_FILE, stated_quantisation
from tests.helpers.published import CONFIGS, MAKERS

SIZE = 1024
COMPRESSED = CONFIGS["compressed-tensors"]
PACKED = COMPRESSED["config_groups"]["group_0"]


@pytest.mark.parametrize("method", MAKERS)
def test_bytes_of_a_matrix_are_those_of_its_tensors(method: str) -> None:
    (scheme,) = stated_quantisation({"quantization_config": CONFIGS[method]}).schemes
    tensors = MAKERS[method](SIZE, SIZE, torch.Generator().manual_seed(0))
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert scheme.nbytes(SIZE, SIZE) == pytest.approx(nbytes, rel=1e-4)


def test_a_quantisation_is_found_at_any_depth_and_under_its_old_name() -> None:
    assert stated_quantisation({"model_type": "olmoe", "text_config": {"hidden_size": 4}}) is None
    fp8 = CONFIGS["fp8"]
    for config in (
        {"text_config": {"quantization_config": fp8}},
        {"quantization_config": fp8, "vision": {"a": 1}},
    ):
        assert stated_quantisation(config).method == "fp8"
    old = {key: value for key, value in COMPRESSED.items() if key != "quant_method"}
    assert stated_quantisation({"compression_config": old}).method == "compressed-tensors"
    modelopt = {"quant_algo": "NVFP4", "config_groups": {"group_0": {}}}
    assert stated_quantisation({"quantization_config": modelopt}).method == "modelopt"


def test_parts_may_repeat_a_quantisation_and_not_contradict_it() -> None:
    twice = {
        "quantization_config": CONFIGS["fp8"],
        "text_config": {"quantization_config": dict(CONFIGS["fp8"])},
    }
    assert stated_quantisation(twice).method == "fp8"
    with pytest.raises(BadInput, match="quantises its parts in different ways"):
        stated_quantisation(twice | {"vision_config": {"quantization_config": CONFIGS["awq"]}})


def of_bits(bits: object) -> dict:
    return COMPRESSED | {
        "config_groups": {"group_0": PACKED | {"weights": PACKED["weights"] | {"num_bits": bits}}}
    }


def asymmetric() -> dict:
    return {"config_groups": {"group_0": {"weights": {"num_bits": 8, "symmetric": False}}}}


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"quant_method": "bitsandbytes"}, f"by 'bitsandbytes': moectl reads {', '.join(METHODS)}"),
        ("int8", "by 'int8'"),
        ({}, "by 'unknown method'"),
        (CONFIGS["gptq"] | {"bits": True}, "bits is true: moectl reads 2, 3, 4, 8"),
        (CONFIGS["awq"] | {"bits": 8}, "bits is 8: moectl reads 4"),
        (of_bits(3), "num_bits is 3: moectl reads 4, 8"),
        (COMPRESSED | {"config_groups": {"group_0": None}}, "num_bits is null: moectl reads 4, 8"),
        (COMPRESSED | {"format": None}, "in the format 'None': moectl reads pack-quantized"),
        (
            CONFIGS["fp8"] | {"weight_block_size": [128]},
            "weight_block_size is [128], which is no size",
        ),
        (CONFIGS["fp8"] | {"expert_dtype": "fp4"}, "experts of fp4 beside FP8"),
        (
            CONFIGS["fp8"] | {"modules_to_not_convert": "lm_head"},
            "modules_to_not_convert in the quantisation",
        ),
        (CONFIGS["awq"] | {"group_size": -2}, "group_size is -2, which is no size of a group"),
        (CONFIGS["gptq"] | {"dynamic": {"+:.*": {"bits": 5}}}, "bits is 5"),
        (CONFIGS["gptq"] | {"dynamic": ["lm_head"]}, "`dynamic` that is no object"),
        *(
            (
                CONFIGS["nvfp4"] | {"quant_algo": name},
                f"quant_algo '{name}': moectl reads NVFP4, FP8",
            )
            for name in ("W4A8_AWQ", "W4A16_AWQ", "NVFP4_AWQ", "MXFP8", "INT8_SQ")
        ),
        (
            CONFIGS["nvfp4"] | {"quant_algo": "FP8_PB_WO", "group_size": "x"},
            'group_size is "x", which is no size',
        ),
        (CONFIGS["gptq"] | {"bits": "four"}, 'bits is "four": moectl reads 2, 3, 4, 8'),
        (
            CONFIGS["gptq"] | {"desc_act": "perhaps"},
            'desc_act in the quantisation of config.json is "perhaps", not',
        ),
        (
            CONFIGS["gptq"] | {"sym": [1]},
            "sym in the quantisation of config.json is [1], not true or false",
        ),
        (CONFIGS["gptq"] | {"format": "gptq_v2"}, "checkpoint_format and format differ"),
        (
            CONFIGS["gptq"] | {"dynamic": {"+:.*": 8}},
            "`dynamic` says 8 for '+:.*', which is no object",
        ),
        (CONFIGS["nvfp4"] | {"group_size": 32}, "group_size is 32: moectl reads 16"),
        (CONFIGS["nvfp4"] | {"quant_algo": "MIXED_PRECISION"}, "without quantized_layers"),
        (COMPRESSED | {"format": "int-quantized"} | asymmetric(), "int-quantized with zero-points"),
    ],
)
def test_what_is_not_read_is_refused(config: object, line: str) -> None:
    with pytest.raises(BadInput, match=re.escape(line)):
        stated_quantisation({"quantization_config": config})


def test_numbers_and_flags_may_be_texts() -> None:
    texts = {"bits": "4", "group_size": "32", "desc_act": "False", "sym": "true"}
    plain = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    said = [
        stated_quantisation({"quantization_config": CONFIGS["gptq"] | each})
        for each in (texts, plain)
    ]
    assert said[0] == said[1]
    blocks = [{"weight_block_size": size} for size in (["16", 16.0], [16, 16])]
    assert (
        len(
            {stated_quantisation({"quantization_config": CONFIGS["fp8"] | each}) for each in blocks}
        )
        == 1
    )


# Which modules


def test_lists_of_modules_to_leave_alone() -> None:
    for listed, left, kept in (
        (
            ["lm_head", "model.layers.0.mlp.gate"],
            "model.layers.0.mlp.gate",
            "model.layers.0.mlp.gate_proj",
        ),
        (["self_attn"], "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.up_proj"),
        (
            ["model.layers.*.self_attn"],
            "model.layers.1.self_attn.o_proj",
            "model.layers.1.mlp.up_proj",
        ),
        (
            ["re:.*(q|k)_proj$"],
            "model.layers.1.self_attn.k_proj",
            "model.layers.1.self_attn.o_proj",
        ),
    ):
        stated = stated_quantisation(
            {"quantization_config": CONFIGS["fp8"] | {"modules_to_not_convert": listed}}
        )
        assert stated.scheme_of(left) is None and stated.scheme_of("lm_head") is None
        assert stated.scheme_of(kept).bits == 8


def test_the_most_exact_target_counts() -> None:
    groups = {
        str(bits): {"weights": {"num_bits": bits}, "targets": [target]}
        for bits, target in ((4, "Linear"), (8, "re:.*down_proj"))
    }
    stated = stated_quantisation(
        {"quantization_config": COMPRESSED | {"config_groups": groups, "ignore": ["lm_head"]}}
    )
    assert [
        stated.scheme_of(f"model.layers.0.mlp.{name}_proj").bits for name in ("up", "down")
    ] == [4, 8]
    assert stated.scheme_of("lm_head") is None


def test_a_pattern_that_is_none_is_refused() -> None:
    stated = stated_quantisation({"quantization_config": COMPRESSED | {"ignore": ["re:(("]}})
    with pytest.raises(BadInput, match="is no regular expression"):
        stated.scheme_of("lm_head")


def test_a_pattern_that_never_ends_is_refused_within_a_second() -> None:
    dynamic = {r"+:(?:[a-z]|[a-z.0-9_]|\w)*\d{9}": {"bits": 8}}
    stated = stated_quantisation({"quantization_config": CONFIGS["gptq"] | {"dynamic": dynamic}})
    started = time.thread_time()
    with pytest.raises(BadInput, match="takes too long to match model.layers.17"):
        stated.scheme_of("model.layers.17.mlp.experts.101.gate_proj")
    assert time.thread_time() - started < 1


def test_a_cache_in_few_bits_is_no_quantisation_of_weights(tmp_path: Path) -> None:
    path = tmp_path / MODELOPT_FILE
    path.write_text('{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}')
    assert stated_quantisation({}, tmp_path) is None
    for text in ("{", "[]"):
        path.write_text(text)
        with pytest.raises(BadInput, match=f"{MODELOPT_FILE} .*: download it again"):
            stated_quantisation({}, tmp_path)
