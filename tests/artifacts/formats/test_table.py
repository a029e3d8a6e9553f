"""What a config.json says of its quantisation."""

import re

import pytest
import torch

from artifacts.errors import BadInput
from artifacts.formats.table import METHODS, quantisation_of
from tests.helpers.published import CONFIGS, MAKERS

SIZE = 1024
COMPRESSED = CONFIGS["compressed-tensors"]
PACKED = COMPRESSED["config_groups"]["group_0"]


@pytest.mark.parametrize("method", MAKERS)
def test_bytes_of_a_weight_are_those_of_its_tensors(method: str) -> None:
    quantisation = quantisation_of({"quantization_config": CONFIGS[method]})
    tensors = MAKERS[method](SIZE, SIZE, torch.Generator().manual_seed(0))
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert quantisation.weight_nbytes * SIZE * SIZE == pytest.approx(nbytes, rel=0.02)


def test_a_quantisation_is_found_at_any_depth_and_under_its_old_name() -> None:
    assert quantisation_of({"model_type": "olmoe", "text_config": {"hidden_size": 4}}) is None
    fp8 = CONFIGS["fp8"]
    for config in ({"text_config": {"quantization_config": fp8}}, {"quantization_config": fp8, "vision": {"a": 1}}):
        assert quantisation_of(config).method == "fp8"
    old = {key: value for key, value in COMPRESSED.items() if key != "quant_method"}
    assert quantisation_of({"compression_config": old}).method == "compressed-tensors"
    modelopt = {"quant_algo": "NVFP4", "config_groups": {"group_0": {}}}
    assert quantisation_of({"quantization_config": modelopt}).method == "modelopt"


def test_parts_may_repeat_a_quantisation_and_not_contradict_it() -> None:
    twice = {"quantization_config": CONFIGS["fp8"], "text_config": {"quantization_config": dict(CONFIGS["fp8"])}}
    assert quantisation_of(twice).method == "fp8"
    with pytest.raises(BadInput, match="quantises its parts in different ways"):
        quantisation_of(twice | {"vision_config": {"quantization_config": CONFIGS["awq"]}})


def of_bits(bits: object) -> dict:
    return COMPRESSED | {"config_groups": {"group_0": PACKED | {"weights": PACKED["weights"] | {"num_bits": bits}}}}


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"quant_method": "bitsandbytes"}, f"by 'bitsandbytes': moectl reads {', '.join(METHODS)}"),
        ("int8", "by 'int8'"),
        ({}, "by 'unknown method'"),
        (CONFIGS["gptq"] | {"bits": True}, "bits is True: moectl reads 2, 3, 4, 8"),
        (CONFIGS["awq"] | {"bits": 8}, "bits is 8: moectl reads 4"),
        (of_bits(3), "num_bits is 3: moectl reads 4, 8"),
        (COMPRESSED | {"config_groups": {"group_0": None}}, "num_bits is None"),
        (COMPRESSED | {"format": None}, "in the format 'None': moectl reads pack-quantized"),
        (CONFIGS["fp8"] | {"weight_block_size": [128]}, "weight_block_size is [128], which is no size"),
    ],
)
def test_what_is_not_read_is_refused(config: object, line: str) -> None:
    with pytest.raises(BadInput, match=re.escape(line)):
        quantisation_of({"quantization_config": config})
