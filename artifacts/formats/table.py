"""The formats by the name that a config gives them, and the roles of their tensors by name."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from artifacts.errors import BadInput
from artifacts.formats.awq import Awq
from artifacts.formats.base import Format
from artifacts.formats.fp8 import BLOCK, Scaled
from artifacts.formats.gptq import BITS as GPTQ_BITS
from artifacts.formats.gptq import Gptq
from artifacts.formats.mxfp4 import MxFp4
from artifacts.formats.nvfp4 import NvFp4
from artifacts.formats.packed_integers import BITS as PACKED_BITS
from artifacts.formats.packed_integers import PackedIntegers

Roles = Mapping[str, str]
"""By role, what follows the name of the matrix in the name of a tensor."""

_GPTQ = {"qweight": ".qweight", "qzeros": ".qzeros", "scales": ".scales", "g_idx": ".g_idx"}
_PACKED = {
    "packed": "_packed",
    "scale": "_scale",
    "zero_point": "_zero_point",
    "g_idx": "_g_idx",
    "size": "_shape",
}
_OPTIONAL = ("g_idx", "zero_point", "size")


@dataclass(frozen=True, slots=True)
class Spelling:
    """A format with the names of its tensors: that of the parameter and what follows it, or, where `is_module`, that of
    the module whose `weight` the parameter is."""

    format: Format
    roles: Roles
    is_module: bool = False

    @property
    def required(self) -> frozenset[str]:
        return frozenset(self.roles) - frozenset(_OPTIONAL)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What a config says of its weights: the method, and the spellings that may occur."""

    method: str
    spellings: tuple[Spelling, ...]
    group_size: int  # inputs with one scale; 0 where a row has one

    @property
    def weight_nbytes(self) -> float:
        """Bytes of one expert weight, scales included."""
        return self.spellings[0].format.weight_nbytes(self.group_size)


def quantisation_of(config: Mapping) -> Quantisation | None:
    """Read the quantisation of a config.json, at its top or in the config of a part of the model; None without one.

    Raises BadInput for a method, a layout or a width that moectl does not read, and for parts of different methods.
    """
    stated = {json.dumps(entry, sort_keys=True): entry for entry in _stated(config)}
    if not stated:
        return None
    if len(stated) > 1:
        raise BadInput("the config.json quantises its parts in different ways: moectl reads one")
    entry = next(iter(stated.values()))
    method = _method(entry)
    if method not in METHODS:
        raise BadInput(f"the weights are quantised by {method[:40]!r}: moectl reads {', '.join(METHODS)}")
    return Quantisation(method, METHODS[method](entry), _group_size(entry))


def _stated(config: Mapping) -> Iterator[Mapping]:
    """Every non-empty quantisation in a config and in the configs inside it."""
    for name, value in config.items():
        if name in _KEYS and value is not None:
            yield value if isinstance(value, Mapping) else {"quant_method": str(value)}
        elif isinstance(value, Mapping):
            yield from _stated(value)


def _method(entry: Mapping) -> str:
    """The method; modelopt and compressed-tensors have files without it."""
    if "config_groups" in entry and "quant_algo" not in entry:
        return str(entry.get("quant_method") or "compressed-tensors")
    return str(entry.get("quant_method") or ("modelopt" if "quant_algo" in entry else "unknown method"))


def _group_size(entry: Mapping) -> int:
    """The group size of a config, or of the first group of modules in it."""
    groups = entry.get("config_groups")
    first = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    weights = first.get("weights") if isinstance(first, Mapping) else None
    size = (weights if isinstance(weights, Mapping) else entry).get("group_size")
    return size if type(size) is int and size > 0 else 0


_KEYS = ("quantization_config", "compression_config")


def _fp8(config: Mapping) -> tuple[Spelling, ...]:
    size = config.get("weight_block_size") or (BLOCK, BLOCK)
    if not (isinstance(size, list | tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise BadInput(f"weight_block_size is {str(size)[:40]}, which is no size of a block")
    return tuple(
        Spelling(Scaled(block=tuple(size)), {"weight": "", "scale": suffix}) for suffix in ("_scale_inv", "_scale")
    )


def _mxfp4(config: Mapping) -> tuple[Spelling, ...]:
    return (Spelling(MxFp4(), {"blocks": "_blocks", "scales": "_scales"}),)


def _gptq(config: Mapping) -> tuple[Spelling, ...]:
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise BadInput(f"GPTQ in the layout {version!r}: moectl reads gptq and gptq_v2")
    bits = _check_bits("bits", config.get("bits"), GPTQ_BITS)
    form = Gptq(bits=bits, zero_offset=int(version == "gptq"), is_permuted=bool(config.get("desc_act")))
    return (Spelling(form, _GPTQ, is_module=True),)


def _awq(config: Mapping) -> tuple[Spelling, ...]:
    version = str(config.get("version") or "gemm").lower()
    if version != "gemm":
        raise BadInput(f"AWQ in the layout {version!r}: moectl reads gemm")
    _check_bits("bits", config.get("bits", config.get("w_bit")), (4,))
    return (Spelling(Awq(), {role: _GPTQ[role] for role in ("qweight", "qzeros", "scales")}, is_module=True),)


def _modelopt(config: Mapping) -> tuple[Spelling, ...]:
    roles = {"packed": "", "scale": "_scale", "global": "_scale_2"}
    return (Spelling(NvFp4(), roles), *_fp8({}))


def _compressed(config: Mapping) -> tuple[Spelling, ...]:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise BadInput("compressed-tensors without config_groups: what its weights are is not said")
    spellings: dict[tuple, Spelling] = {}
    for group in groups.values():
        spelling = _group(config, group if isinstance(group, Mapping) else {})
        spellings[spelling.format.name, tuple(spelling.roles)] = spelling
    return tuple(spellings.values())


def _group(config: Mapping, group: Mapping) -> Spelling:
    """The spelling of one group of compressed-tensors' modules."""
    kind = group.get("format") or config.get("format")
    weights = group.get("weights")
    weights = weights if isinstance(weights, Mapping) else {}
    match kind:
        case "pack-quantized":
            bits = _check_bits("num_bits", weights.get("num_bits"), PACKED_BITS)
            return Spelling(PackedIntegers(bits=bits), _PACKED)
        case "float-quantized" | "int-quantized" | "naive-quantized":
            _check_bits("num_bits", weights.get("num_bits"), (8,))
            block = weights.get("block_structure")
            return _fp8({"weight_block_size": block} if isinstance(block, list) else {})[1]
        case "nvfp4-pack-quantized":
            return Spelling(NvFp4(is_inverse=True), {"packed": "_packed", "scale": "_scale", "global": "_global_scale"})
        case "mxfp4-pack-quantized":
            return Spelling(MxFp4(), {"blocks": "_packed", "scales": "_scale"})
    raise BadInput(f"compressed-tensors in the format {str(kind)[:40]!r}: moectl reads {', '.join(_COMPRESSED)}")


_COMPRESSED = (
    "pack-quantized",
    "float-quantized",
    "int-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)

METHODS: dict[str, Callable[[Mapping], tuple[Spelling, ...]]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
}


def _check_bits(name: str, bits: object, known: tuple[int, ...]) -> int:
    if bits not in known or isinstance(bits, bool):
        raise BadInput(f"{name} is {str(bits)[:40]}: moectl reads {', '.join(map(str, known))}")
    return bits
