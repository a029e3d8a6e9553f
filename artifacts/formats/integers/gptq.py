"""GPTQ: codes in a stream of 32-bit words down the inputs, as AutoGPTQ and GPTQModel write them (2,
3, 4 and 8 bits).

`w[o, k] = scales[g, o] * (q[k, o] - z[g, o])` with the group `g = g_idx[k]`, which `desc_act`
permutes. The first version of the layout stores z - 1, the second z.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from artifacts.common.lazy_torch import torch
from artifacts.errors import BadInput
from artifacts.formats.base import (
    CONTRADICTED,
    Described,
    Format,
    Loop,
    PlacedTensors,
    Stored,
    StoredZeros,
    fault_of_scales,
    is_number,
    loops,
    require,
    require_groups,
)
from artifacts.formats.codes import unpack
from artifacts.formats.integers.order import NO_NUMBER, fault_of_index, placed, require_index
from artifacts.formats.modules import REGEX
from artifacts.formats.schemes import (
    BLOCK,
    HEAD,
    OPTIONAL,
    Group,
    Said,
    Scheme,
    Spelling,
    flag,
    group_size,
    number,
)

ZEROS = "qzeros"
NAMES = {"qweight": ".qweight", ZEROS: ".qzeros", "scales": ".scales"}


@dataclass(frozen=True, slots=True)
class Gptq(Format):
    """`qweight` int32 [in * bits / 32, out], `qzeros` int32 [groups, out * bits / 32], `scales`
    [groups, out] and `g_idx` int32 [in]. `g_idx` may be missing where the groups follow each other;
    in a slot it is `order`."""

    name: str = "gptq"
    bits: int = 4
    zero_offset: int = 1  # what the first version of the layout subtracted from a zero-point
    is_permuted: bool = False  # `desc_act`: the groups do not follow each other
    is_symmetric: bool = False  # `sym`: every zero-point is in the middle of the codes
    symmetry: str = "that it is symmetric"  # how the config says that
    group_size: int | None = None  # as the config says, 0 for one group

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        words, zeros, scales = (stored[role] for role in ("qweight", "qzeros", "scales"))
        require(
            words.dtype is zeros.dtype is torch.int32, f"codes of {words.dtype} and {zeros.dtype}"
        )
        require(is_number(scales.dtype), f"scales of {scales.dtype}")
        require(
            len(words.shape) == len(scales.shape) == len(zeros.shape) == 2,
            "tensors that are no matrices",
        )
        num_groups, num_outputs = scales.shape
        require(
            0 not in (*words.shape, num_groups) and words.shape[1] == num_outputs,
            "scales of other outputs",
        )
        fit = (num_groups, -(-num_outputs * self.bits // 32))
        require(zeros.shape == fit, f"zero-points {list(zeros.shape)} are of no such groups")
        num_inputs = words.shape[0] * 32 // self.bits
        is_indexed = require_index(stored, num_inputs, num_groups)
        require(is_indexed or not self.is_permuted, "desc_act is set and g_idx is missing")
        require(
            num_inputs % num_groups == 0 or is_indexed,
            f"{num_groups} groups of {num_inputs} inputs",
        )
        require_groups(num_groups, num_inputs, self.group_size, is_indexed=is_indexed)
        return num_outputs, num_inputs

    @property
    def lacking(self) -> int:
        """Number at every input of an index that says nothing, as some writers leave it without
        `desc_act`."""
        return NO_NUMBER if self.is_permuted else 0

    def settled(self, zeros: torch.Tensor) -> Gptq:
        """Return this format with the offset by which these zero-points of a symmetric matrix are
        in the middle: some files store the zero-points of one version and name the other. Return
        the format itself where neither offset does it."""
        found = unpack(zeros, self.bits, zeros.shape[1] * 32 // self.bits)
        offset = (1 << self.bits - 1) - int(found[0, 0])
        return replace(self, zero_offset=offset) if offset in (0, 1) else self

    def row_of_zeros(self, num_outputs: int) -> bytes:
        """The zero-points of one group of a symmetric matrix, as they are stored."""
        one = (1 << self.bits - 1) - self.zero_offset
        every = one * ((1 << self.bits * num_outputs) - 1) // ((1 << self.bits) - 1)
        return every.to_bytes(4 * -(-num_outputs * self.bits // 32), "little")

    def dequantise(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        words = tensors["qweight"]
        scales = tensors["scales"].float()
        points = self._points(tensors)
        num_inputs = words.shape[0] * 32 // self.bits
        group, place, _, is_moved = placed(tensors, num_inputs, len(scales), self.lacking)
        matrix = (unpack(words.T, self.bits, num_inputs) - points.T[:, group]).float() * scales.T[
            :, group
        ]
        return matrix[:, place] if is_moved else matrix

    def loop(self, tensors: Mapping[str, torch.Tensor]) -> Loop | None:
        words = tensors["qweight"]
        scales = tensors["scales"].float()
        points = self._points(tensors)
        num_inputs = words.shape[0] * 32 // self.bits
        groups, places, *_ = placed(tensors, num_inputs, len(scales), self.lacking)
        arrays = (points.contiguous().numpy(), scales.numpy(), groups.numpy(), places.numpy())
        return partial(
            loops("integers.column_loops").from_stream, words.numpy(), self.bits, *arrays
        )

    def described(self, tensors: PlacedTensors) -> Described:
        num_groups, num_words = tensors.shape(ZEROS)
        width = -(-tensors.num_inputs // num_groups)
        return Described(
            tensors.codes("qweight", "integer", self.bits, "columns"),
            tensors.scales_at("scales", num_groups, 1, width, 1, tensors.num_outputs),
            StoredZeros(tensors.start(ZEROS), num_words, 1, num_words, self.zero_offset),
        )

    def fault(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        scales = tensors["scales"]
        middle = 1 << self.bits - 1
        num_inputs = len(tensors["qweight"]) * 32 // self.bits
        fault = fault_of_index(tensors, num_inputs, len(scales), self.group_size, self.lacking)
        fault = fault or fault_of_scales(scales, 2**self.bits - 1)
        if fault is None and self.is_symmetric and bool((self._points(tensors) != middle).any()):
            return (
                f"zero-points other than {middle}, and config.json says {self.symmetry}: "
                f"{CONTRADICTED}"
            )
        return fault

    def _points(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The zero-points, int32 [groups, out]."""
        stored = unpack(tensors["qzeros"], self.bits, tensors["scales"].shape[1])
        return stored + self.zero_offset & 2**self.bits - 1


def said(config: Mapping) -> Said:
    """Read GPTQ's config. GPTQModel's `dynamic` holds by pattern the entries that differ there;
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
    left = [] if config.get("lm_head") else [*HEAD]
    for pattern, entries in dynamic.items():
        if pattern.startswith("-:"):
            left.append(REGEX + pattern.removeprefix("-:"))
        elif not isinstance(entries, Mapping):
            raise BadInput(
                f"GPTQ's `dynamic` says {json.dumps(entries)[:40]} for {pattern[:40]!r}, which is "
                "no object"
            )
        else:
            target = REGEX + pattern.removeprefix("+:")
            groups.append(Group(_scheme(version, {**config, **entries}), (target,)))
    return Said((*groups, Group(_scheme(version, config))), tuple(left))


def _scheme(layout: str, config: Mapping) -> Scheme:
    bits = number("bits", config.get("bits"), (2, 3, 4, 8))
    is_ordered, is_symmetric = (flag(config, name) is True for name in ("desc_act", "sym"))
    size = group_size(config, BLOCK)
    form = Gptq(
        bits=bits,
        zero_offset=int(layout == "gptq"),
        is_permuted=is_ordered,
        group_size=size,
        is_symmetric=is_symmetric,
    )
    # Zero-points that are all one number may be missing, or be those of another version.
    optional = OPTIONAL | {ZEROS} if is_symmetric else OPTIONAL
    spelling = Spelling(form, NAMES | {"g_idx": ".g_idx"}, is_module=True, optional=optional)
    return Scheme(layout, bits, (1, size), 2, (spelling,), has_zeros=True, has_index=True)
