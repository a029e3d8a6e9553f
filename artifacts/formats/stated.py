"""Finds what a checkpoint says of its quantisation: in its config, at any depth, or in modelopt's
file beside it.

Imports no torch: a plan reads it in milliseconds.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from artifacts.common.untrusted import read_json
from artifacts.errors import BadInput
from artifacts.formats.modules import is_among, strength
from artifacts.formats.schemes import METHODS, Group, Scheme

MODELOPT_FILE = "hf_quant_config.json"
_KEYS = ("quantization_config", "compression_config")
_NOTHING = (
    "",
    "none",
    "no_quant",
)  # algorithms of modelopt that quantise no weights, perhaps the attention cache


@dataclass(frozen=True, slots=True)
class Stated:
    """The method, its schemes with their modules, and patterns of modules that are left alone."""

    method: str
    groups: tuple[Group, ...]
    left: tuple[str, ...]

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """Each scheme that may occur, once."""
        return tuple(dict.fromkeys(group.scheme for group in self.groups))

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a module; None where it is left in the model's own dtype."""
        if is_among(module, self.left):
            return None
        best = max(self.groups, key=lambda group: _strength(group, module))
        return best.scheme if _strength(best, module) else None


def _strength(group: Group, module: str) -> int:
    return max((strength(target, module) for target in group.targets), default=0)


def stated_quantisation(config: Mapping, folder: Path | None = None) -> Stated | None:
    """Read the quantisation of a config.json, at its top or in the config of a part of the model,
    or, where it has none, of modelopt's file in the folder; None without one.

    Raises BadInput for a method, a layout or a width that moectl does not read, and for parts of
    different methods.
    """
    entries = {json.dumps(entry, sort_keys=True): entry for entry in _entries(config)}
    if len(entries) > 1:
        raise BadInput("the config.json quantises its parts in different ways: moectl reads one")
    entry = next(iter(entries.values()), None)
    if entry is None and folder is not None:
        entry = _beside(folder)
    if entry is None:
        return None
    method = _method(entry)
    if method == "modelopt" and str(entry.get("quant_algo")).lower() in _NOTHING:
        return None
    if method not in METHODS:
        raise BadInput(
            f"the weights are quantised by {method[:40]!r}: moectl reads {', '.join(METHODS)}"
        )
    return Stated(method, *METHODS[method](entry))


def _entries(config: Mapping) -> Iterator[Mapping]:
    """Every quantisation in a config and in the configs inside it."""
    for name, value in config.items():
        if name in _KEYS and value is not None:
            yield _unwrapped(value) if isinstance(value, Mapping) else {"quant_method": str(value)}
        elif isinstance(value, Mapping):
            yield from _entries(value)


def _unwrapped(entry: Mapping) -> Mapping:
    """modelopt's file has what it says under `quantization`, and so have configs that took it over
    as it is."""
    inner = entry.get("quantization")
    return {"quant_method": "modelopt", **inner} if isinstance(inner, Mapping) else entry


def _beside(folder: Path) -> Mapping | None:
    path = folder / MODELOPT_FILE
    if not path.is_file():
        return None
    try:
        entry = read_json(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read ({error}): download it again") from error
    if not isinstance(entry, Mapping) or not isinstance(entry.get("quantization"), Mapping):
        raise BadInput(f"{path} says nothing of a quantization: download it again")
    return _unwrapped(entry)


def _method(entry: Mapping) -> str:
    """The method; modelopt and compressed-tensors have files without it."""
    if "config_groups" in entry and "quant_algo" not in entry:
        return str(entry.get("quant_method") or "compressed-tensors")
    return str(
        entry.get("quant_method") or ("modelopt" if "quant_algo" in entry else "unknown method")
    )
