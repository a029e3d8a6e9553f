"""Storage schemes of matrices, and readers of the entries of a config that states them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from artifacts.errors import BadInput
from artifacts.formats.modules import CLASS

if TYPE_CHECKING:  # it imports numpy, and `moectl --help` gets here
    from artifacts.formats.base import Format

BLOCK = 128
"""Rows and columns of a block in FP8, and inputs of a group in GPTQ and AWQ, unless the config says
others."""
WHOLE = 0
"""The size of a block that reaches over a whole axis."""
ALL = (CLASS,)
"""The target that means every module."""
HEAD = ("lm_head",)
"""Left alone unless a config names it."""
OPTIONAL = frozenset(("g_idx", "zero_point", "size"))
"""Roles of tensors that files may lack."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """A format with the names of its tensors: `roles` has the ending of a name by role, first that
    of the tensor by which a matrix is found. Each name begins with the parameter's, or, if
    `is_module`, with that of the module whose `weight` the parameter is. Files may lack the tensors
    of the `optional` roles."""

    format: Format
    roles: Mapping[str, str] = field(hash=False)
    is_module: bool = False
    optional: frozenset[str] = OPTIONAL

    @property
    def anchor(self) -> str:
        """The ending of the tensor by which a matrix is found."""
        return next(iter(self.roles.values()))

    @property
    def required(self) -> frozenset[str]:
        return frozenset(self.roles) - self.optional


@dataclass(frozen=True, slots=True)
class Scheme:
    """Storage scheme of a matrix: its `layout` as it is shown, `block` the rows and columns with
    one scale, `scale_nbytes` its bytes, and the names that its tensors may have, the usual ones
    first."""

    layout: str
    bits: int
    block: tuple[int, int]
    scale_nbytes: int
    spellings: tuple[Spelling, ...]
    has_zeros: bool = False
    has_index: bool = False

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
    targets: tuple[str, ...] = ALL


class Said(NamedTuple):
    """Groups in the order in which equally exact targets count, and patterns of modules that are
    left alone."""

    groups: tuple[Group, ...]
    left: tuple[str, ...] = HEAD


def number(name: str, value: object, known: tuple[int, ...]) -> int:
    """A whole number of a config, which must be a known one."""
    whole = whole_number(value)
    if whole not in known:
        raise BadInput(
            f"{name} is {json.dumps(value)[:40]}: moectl reads {', '.join(map(str, known))}"
        )
    return whole


_FLAGS = {None: None, True: True, False: False, "true": True, "false": False}


def whole_number(value: object) -> object:
    """Return a number that is written as a text or a fraction, like "4" or 4.0, as an int; anything
    else as it is."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return (
        int(value)
        if isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value, re.ASCII)
        else value
    )


def flag(config: Mapping, name: str) -> bool | None:
    """A value that is true or false, perhaps as a text; None where the config does not say it."""
    value = config.get(name)
    said = value.lower() if isinstance(value, str) else value
    if not isinstance(said, str | int | None) or said not in _FLAGS:
        raise BadInput(
            f"{name} in the quantisation of config.json is {json.dumps(value)[:40]}, not true or "
            "false"
        )
    return _FLAGS[said]


def group_size(config: Mapping, usual: int) -> int:
    """Inputs with one scale; -1 stands for all of a row."""
    size = whole_number(config.get("group_size"))
    if size is None:
        return usual
    if type(size) is not int or size < -1:
        raise BadInput(f"group_size is {json.dumps(size)[:40]}, which is no size of a group")
    return max(size, WHOLE)


def patterns(config: Mapping, name: str) -> tuple[str, ...]:
    """A list of modules, by names or patterns."""
    listed = config.get(name) or ()
    if not isinstance(listed, list | tuple) or not all(isinstance(each, str) for each in listed):
        raise BadInput(
            f"{name} in the quantisation of config.json is no list of names: download it again"
        )
    return tuple(listed)
