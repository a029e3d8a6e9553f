"""The config of compressed-tensors, which names a format for each group of modules."""

from collections.abc import Iterator, Mapping

from artifacts.errors import BadInput
from artifacts.formats import mxfp4, nvfp4
from artifacts.formats.fp8 import block_of, float_quantized
from artifacts.formats.integers import packed_integers
from artifacts.formats.schemes import ALL, WHOLE, Group, Said, Scheme, flag, number, patterns

_FORMATS = (
    "pack-quantized",
    "float-quantized",
    "int-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)


def said(config: Mapping) -> Said:
    """Read compressed-tensors' config."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise BadInput("compressed-tensors without config_groups: what its weights are is not said")
    return Said(tuple(_groups(config, groups)), patterns(config, "ignore"))


def _groups(config: Mapping, groups: Mapping) -> Iterator[Group]:
    for group in groups.values():
        group = group if isinstance(group, Mapping) else {}
        weights = group.get("weights")
        weights = weights if isinstance(weights, Mapping) else {}
        scheme = _scheme(group.get("format") or config.get("format"), weights)
        yield Group(scheme, patterns(group, "targets") or ALL)


def _scheme(layout: object, weights: Mapping) -> Scheme:
    is_asymmetric = flag(weights, "symmetric") is False
    match layout:
        case "pack-quantized":
            return packed_integers.scheme(layout, weights)
        case "float-quantized" | "int-quantized" | "naive-quantized":
            number("num_bits", weights.get("num_bits"), (8,))
            if is_asymmetric:
                raise BadInput(
                    f"{layout} with zero-points: moectl reads symmetric weights of 8 bits, and "
                    "packed ones"
                )
            return float_quantized(_block(weights))
        case "nvfp4-pack-quantized":
            return nvfp4.scheme(layout, "_packed", "_global_scale", is_inverse=True)
        case "mxfp4-pack-quantized":
            return mxfp4.scheme(layout, "_packed", "_scale")
    raise BadInput(
        f"compressed-tensors in the format {str(layout)[:40]!r}: moectl reads {', '.join(_FORMATS)}"
    )


def _block(weights: Mapping) -> tuple[int, int]:
    """The block of weights of 8 bits, by their strategy."""
    if weights.get("strategy") == "block" or isinstance(weights.get("block_structure"), list):
        return block_of(weights.get("block_structure"))
    return (WHOLE, WHOLE) if weights.get("strategy") == "tensor" else (1, WHOLE)
