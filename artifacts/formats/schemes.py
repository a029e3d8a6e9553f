"""Parsers of the config of each quantisation method: the schemes of its modules, and the modules
that it leaves alone.

Imports no torch: a plan reads it in milliseconds.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from artifacts.errors import BadInput
from artifacts.formats.modules import CLASS, REGEX

# rows and columns of a block in FP8, and inputs of a group in GPTQ and AWQ, unless the config says
# others
BLOCK = 128
WHOLE = 0  # the size of a block that reaches over a whole axis


@dataclass(frozen=True, slots=True)
class Scheme:
    """Storage scheme of a matrix: `layout` is a key of the table of formats, `block` the rows and
    columns with one scale, `scale_nbytes` its bytes. `is_ordered`: the columns of a group do not
    follow each other. `is_symmetric`: the config says that zero-points are in the middle of the
    codes."""

    layout: str
    bits: int
    block: tuple[int, int]
    scale_nbytes: int
    has_zeros: bool = False
    has_index: bool = False
    is_ordered: bool = False
    is_symmetric: bool = False

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix [rows, columns] with its scales, zero-points and index."""
        height, width = (
            size or whole for size, whole in zip(self.block, (rows, columns), strict=True)
        )
        num_blocks = -(-rows // height) * -(-columns // width)
        of_block = self.scale_nbytes + (self.bits / 8 if self.has_zeros else 0)
        return round(
            rows * columns * self.bits / 8 + num_blocks * of_block + 4 * columns * self.has_index
        )


class Group(NamedTuple):
    """The modules that `targets` name, and their scheme."""

    scheme: Scheme
    targets: tuple[str, ...]


class Said(NamedTuple):
    """Groups in the order in which equally exact targets count, and patterns of modules that are
    left alone."""

    groups: tuple[Group, ...]
    left: tuple[str, ...]


_ALL = (CLASS,)
_HEAD = ("lm_head",)  # left alone unless a config names it
_MXFP4 = Scheme("mxfp4", 4, (1, 32), 1)
_NVFP4 = Scheme("nvfp4", 4, (1, 16), 1)


def _scaled(layout: str, block: tuple[int, int]) -> Scheme:
    return Scheme(layout, 8, block, 4)


def _fp8(config: Mapping) -> Said:
    if config.get("expert_dtype", "fp8") != "fp8":
        raise BadInput(
            f"experts of {str(config['expert_dtype'])[:40]} beside FP8: moectl reads experts in fp8"
        )
    left = _patterns(config, "modules_to_not_convert") or _patterns(config, "ignored_layers")
    return Said(
        (Group(_scaled("fp8", _block(config.get("weight_block_size"))), _ALL),), left + _HEAD
    )


def _block(size: object) -> tuple[int, int]:
    if not size:
        return BLOCK, BLOCK
    block = tuple(map(_whole, size)) if isinstance(size, list) else ()
    if len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise BadInput(f"weight_block_size is {json.dumps(size)[:40]}, which is no size of a block")
    return block


def _mxfp4(config: Mapping) -> Said:
    return Said(
        (Group(_MXFP4, (f"{REGEX}.*experts",)),),
        _patterns(config, "modules_to_not_convert") + _HEAD,
    )


def _gptq(config: Mapping) -> Said:
    """Parse GPTQ's config. GPTQModel's `dynamic` holds by pattern the entries that differ there;
    `-:` before a pattern leaves its modules alone."""
    said = {str(config[name]) for name in ("checkpoint_format", "format") if config.get(name)} or {
        "gptq"
    }
    version = said.pop()
    if said:
        raise BadInput(
            "GPTQ whose checkpoint_format and format differ: which one the zero-points are in is "
            "not said"
        )
    if version not in ("gptq", "gptq_v2"):
        raise BadInput(f"GPTQ in the layout {version!r}: moectl reads gptq and gptq_v2")
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise BadInput("GPTQ with `dynamic` that is no object: what differs there is not said")
    groups = []
    left = [] if config.get("lm_head") else [*_HEAD]
    for pattern, entries in dynamic.items():
        if pattern.startswith("-:"):
            left.append(REGEX + pattern.removeprefix("-:"))
        elif not isinstance(entries, Mapping):
            raise BadInput(
                f"GPTQ's `dynamic` says {json.dumps(entries)[:40]} for {pattern[:40]!r}, which is "
                "no object"
            )
        else:
            groups.append(
                Group(
                    _gptq_scheme(version, {**config, **entries}),
                    (REGEX + pattern.removeprefix("+:"),),
                )
            )
    return Said((*groups, Group(_gptq_scheme(version, config), _ALL)), tuple(left))


def _gptq_scheme(layout: str, config: Mapping) -> Scheme:
    bits = _number("bits", config.get("bits"), (2, 3, 4, 8))
    is_ordered, is_symmetric = (_flag(config, name) is True for name in ("desc_act", "sym"))
    block = 1, _group_size(config, BLOCK)
    return Scheme(
        layout,
        bits,
        block,
        2,
        True,
        has_index=True,
        is_ordered=is_ordered,
        is_symmetric=is_symmetric,
    )


def _awq(config: Mapping) -> Said:
    version = str(config.get("version") or "gemm").lower()
    if version != "gemm":
        raise BadInput(f"AWQ in the layout {version!r}: moectl reads gemm")
    _number("bits", config.get("bits", config.get("w_bit")), (4,))
    size = _group_size({"group_size": config.get("group_size", config.get("q_group_size"))}, BLOCK)
    left = _patterns(config, "modules_to_not_convert") + _HEAD
    is_symmetric = _flag(config, "zero_point") is False
    return Said(
        (Group(Scheme("awq", 4, (1, size), 2, has_zeros=True, is_symmetric=is_symmetric), _ALL),),
        left,
    )


_ALGORITHMS = {  # modelopt's; FP8 has one scale a matrix, a row or a block
    "NVFP4": _NVFP4,
    "FP8": _scaled("float-quantized", (WHOLE, WHOLE)),
    "FP8_PER_CHANNEL_PER_TOKEN": _scaled("float-quantized", (1, WHOLE)),
    "FP8_PB_WO": _scaled("fp8_pb_wo", (BLOCK, BLOCK)),
}
_MIXED = "MIXED_PRECISION"


def _modelopt(config: Mapping) -> Said:
    left = _patterns(config, "exclude_modules") + _patterns(config, "ignore") + _HEAD
    if str(config.get("quant_algo")).upper() != _MIXED:
        return Said((Group(_algorithm(config), _ALL),), left)
    layers = config.get("quantized_layers")
    if not isinstance(layers, Mapping) or not all(
        isinstance(entry, Mapping) for entry in layers.values()
    ):
        raise BadInput(
            f"modelopt's {_MIXED} without quantized_layers: what its weights are is not said"
        )
    return Said(tuple(Group(_algorithm(entry), (name,)) for name, entry in layers.items()), left)


def _algorithm(config: Mapping) -> Scheme:
    name = config.get("quant_algo")
    scheme = _ALGORITHMS.get(str(name).upper())
    if scheme is None:
        known = ", ".join((*_ALGORITHMS, _MIXED))
        raise BadInput(f"modelopt's quant_algo {str(name)[:40]!r}: moectl reads {known}")
    if scheme is _NVFP4 and config.get("group_size") is not None:
        _number("group_size", config["group_size"], (_NVFP4.block[1],))
    if scheme.layout == "fp8_pb_wo":
        size = _group_size(config, BLOCK)
        return replace(scheme, block=(size, size))
    return scheme


def _compressed(config: Mapping) -> Said:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise BadInput("compressed-tensors without config_groups: what its weights are is not said")
    return Said(tuple(_compressed_groups(config, groups)), _patterns(config, "ignore"))


def _compressed_groups(config: Mapping, groups: Mapping) -> Iterator[Group]:
    for group in groups.values():
        group = group if isinstance(group, Mapping) else {}
        weights = group.get("weights")
        weights = weights if isinstance(weights, Mapping) else {}
        scheme = _compressed_scheme(group.get("format") or config.get("format"), weights)
        yield Group(scheme, _patterns(group, "targets") or _ALL)


def _compressed_scheme(layout: object, weights: Mapping) -> Scheme:
    """The scheme of one group of compressed-tensors' modules."""
    is_symmetric = _flag(weights, "symmetric")
    has_zeros = is_symmetric is False
    match layout:
        case "pack-quantized":
            bits = _number("num_bits", weights.get("num_bits"), (4, 8))
            is_ordered = str(weights.get("actorder")).lower() == "group"
            block = 1, _group_size(weights, WHOLE)
            return Scheme(
                layout,
                bits,
                block,
                2,
                has_zeros,
                has_index=is_ordered,
                is_ordered=is_ordered,
                is_symmetric=is_symmetric is True,
            )
        case "float-quantized" | "int-quantized" | "naive-quantized":
            _number("num_bits", weights.get("num_bits"), (8,))
            if has_zeros:
                raise BadInput(
                    f"{layout} with zero-points: moectl reads symmetric weights of 8 bits, and "
                    "packed ones"
                )
            return _scaled("float-quantized", _scaled_block(weights))
        case "nvfp4-pack-quantized":
            return Scheme(layout, _NVFP4.bits, _NVFP4.block, _NVFP4.scale_nbytes)
        case "mxfp4-pack-quantized":
            return Scheme(layout, _MXFP4.bits, _MXFP4.block, _MXFP4.scale_nbytes)
    raise BadInput(
        f"compressed-tensors in the format {str(layout)[:40]!r}: moectl reads "
        f"{', '.join(_COMPRESSED)}"
    )


def _scaled_block(weights: Mapping) -> tuple[int, int]:
    """The block of compressed-tensors' weights of 8 bits, by their strategy."""
    if weights.get("strategy") == "block" or isinstance(weights.get("block_structure"), list):
        return _block(weights.get("block_structure"))
    return (WHOLE, WHOLE) if weights.get("strategy") == "tensor" else (1, WHOLE)


_COMPRESSED = (
    "pack-quantized",
    "float-quantized",
    "int-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)

METHODS: dict[str, Callable[[Mapping], Said]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
}


def _number(name: str, value: object, known: tuple[int, ...]) -> int:
    number = _whole(value)
    if number not in known:
        raise BadInput(
            f"{name} is {json.dumps(value)[:40]}: moectl reads {', '.join(map(str, known))}"
        )
    return number


_FLAGS = {None: None, True: True, False: False, "true": True, "false": False}


def _whole(value: object) -> object:
    """Return a number that is written as a text or a fraction, like "4" or 4.0, as an int; anything
    else as it is."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return (
        int(value)
        if isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value, re.ASCII)
        else value
    )


def _flag(config: Mapping, name: str) -> bool | None:
    """A value that is true or false, perhaps as a text; None where the config does not say it."""
    value = config.get(name)
    said = value.lower() if isinstance(value, str) else value
    if not isinstance(said, str | int | None) or said not in _FLAGS:
        raise BadInput(
            f"{name} in the quantisation of config.json is {json.dumps(value)[:40]}, not true or "
            "false"
        )
    return _FLAGS[said]


def _group_size(config: Mapping, usual: int) -> int:
    """Inputs with one scale; -1 stands for all of a row."""
    size = _whole(config.get("group_size"))
    if size is None:
        return usual
    if type(size) is not int or size < -1:
        raise BadInput(f"group_size is {json.dumps(size)[:40]}, which is no size of a group")
    return max(size, WHOLE)


def _patterns(config: Mapping, name: str) -> tuple[str, ...]:
    listed = config.get(name) or ()
    if not isinstance(listed, list | tuple) or not all(isinstance(each, str) for each in listed):
        raise BadInput(
            f"{name} in the quantisation of config.json is no list of names: download it again"
        )
    return tuple(listed)
