"""Finds what a checkpoint says of its quantisation: in its config, at any depth, or in modelopt's
file beside it.

Imports no torch: a plan reads it in milliseconds. Other packages add a format by an entry point of
the group `moectl.formats`, named as `quant_method` of the config, or by `register_format`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from itertools import chain
from pathlib import Path

from artifacts.common.outside import installed, load
from artifacts.common.untrusted import read_json
from artifacts.errors import BadInput, BadUsage
from artifacts.formats.modules import is_among, strength
from artifacts.formats.schemes import Group, Said, Scheme, Spelling

MODELOPT_FILE = "hf_quant_config.json"
_KEYS = ("quantization_config", "compression_config")
_NOTHING = (
    "",
    "none",
    "no_quant",
)  # algorithms of modelopt that quantise no weights, perhaps the attention cache
_GROUP = "moectl.formats"


def _reader(module: str) -> Callable[[Mapping], Said]:
    """Return a function that reads a config by a format's file, and imports that file only then."""
    return lambda config: import_module(f"artifacts.formats.{module}").said(config)


METHODS = {
    "fp8": _reader("fp8"),
    "mxfp4": _reader("mxfp4"),
    "gptq": _reader("integers.gptq"),
    "awq": _reader("integers.awq"),
    "modelopt": _reader("modelopt"),
    "compressed-tensors": _reader("compressed_tensors"),
}
"""What reads the config of each method, by its `quant_method`."""


@dataclass(frozen=True)  # without slots, for what is found once
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

    @property
    def spellings(self) -> tuple[Spelling, ...]:
        """Each spelling that may occur, in the order in which matrices are looked for."""
        return tuple(chain(*self._by_scheme))

    def is_spelled(self, module: str, spelling: Spelling) -> bool:
        """Return whether tensors of a module that have the names of this spelling are of its
        format. Where several schemes share the names, the config says which it is."""
        if spelling.anchor not in self._ambiguous:
            return True
        scheme = self.scheme_of(module)
        return scheme is not None and spelling in scheme.spellings

    @property
    def _by_scheme(self) -> Iterable[tuple[Spelling, ...]]:
        return dict.fromkeys(scheme.spellings for scheme in self.schemes)

    @cached_property
    def _ambiguous(self) -> frozenset[str]:
        """The anchors that several schemes share."""
        anchors = Counter(
            chain(*({spelling.anchor for spelling in each} for each in self._by_scheme))
        )
        return frozenset(anchor for anchor, count in anchors.items() if count > 1)


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
    outside = installed(_GROUP)
    if method in outside:
        load(f"format {method}", outside[method], partial(register_format, method))
    if method not in METHODS:
        known = ", ".join(dict.fromkeys((*METHODS, *outside)))
        raise BadInput(f"the weights are quantised by {method[:40]!r}: moectl reads {known}")
    return Stated(method, *METHODS[method](entry))


def register_format(method: str, read: Callable[[Mapping], Said]) -> None:
    """Let `read` tell what a config says whose `quant_method` is this. Raises BadUsage where it is
    no function, and for a method that another format has."""
    if not callable(read):
        raise BadUsage(f"what reads the format {method} is no function")
    if METHODS.setdefault(method, read) is not read:
        raise BadUsage(f"{method} cannot be the name of a format: it is taken")


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
