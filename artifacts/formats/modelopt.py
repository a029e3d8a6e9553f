"""The config of NVIDIA's modelopt, which names an algorithm for the model or for each of its
layers."""

from collections.abc import Mapping

from artifacts.errors import BadInput
from artifacts.formats import nvfp4
from artifacts.formats.fp8 import float_quantized, scaled
from artifacts.formats.schemes import (
    BLOCK,
    HEAD,
    WHOLE,
    Group,
    Said,
    Scheme,
    group_size,
    number,
    patterns,
)

# FP8 has one scale a matrix, a row or a block
_ALGORITHMS = ("NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
_MIXED = "MIXED_PRECISION"


def said(config: Mapping) -> Said:
    """Read modelopt's config."""
    left = patterns(config, "exclude_modules") + patterns(config, "ignore") + HEAD
    if str(config.get("quant_algo")).upper() != _MIXED:
        return Said((Group(_scheme(config)),), left)
    layers = config.get("quantized_layers")
    if not isinstance(layers, Mapping) or not all(
        isinstance(entry, Mapping) for entry in layers.values()
    ):
        raise BadInput(
            f"modelopt's {_MIXED} without quantized_layers: what its weights are is not said"
        )
    return Said(tuple(Group(_scheme(entry), (name,)) for name, entry in layers.items()), left)


def _scheme(config: Mapping) -> Scheme:
    name = str(config.get("quant_algo"))
    match name.upper():
        case "NVFP4":
            if config.get("group_size") is not None:
                number("group_size", config["group_size"], (nvfp4.GROUP,))
            return nvfp4.scheme("nvfp4", "", "_scale_2", is_inverse=False)
        case "FP8":
            return float_quantized((WHOLE, WHOLE))
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return float_quantized((1, WHOLE))
        case "FP8_PB_WO":
            size = group_size(config, BLOCK)
            return scaled("fp8_pb_wo", (size, size), "_scale", "_scale_inv")
    known = ", ".join((*_ALGORITHMS, _MIXED))
    raise BadInput(f"modelopt's quant_algo {name[:40]!r}: moectl reads {known}")
