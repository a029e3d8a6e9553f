"""Finder of every expert's stored bytes, in both checkpoint layouts, by transformers' own
conversion rules."""

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from artifacts.errors import BadInput
from artifacts.formats.base import Format, Turned
from artifacts.formats.integers.awq import in_slot
from artifacts.formats.integers.order import ORDER
from artifacts.shape import Shape
from runtime.model.files.checkpoint import RepeatedBytes, StoredTensor
from runtime.model.files.conversions import (
    check_plain,
    is_joined,
    is_stack,
    is_swap,
    is_turned,
    stored_shape,
    takes_turns,
)
from runtime.model.files.expert_store import Extent
from runtime.model.files.row_table import has_rows
from runtime.model.layers import MoeLayer
from runtime.model.layout import ALIGNMENT, ExpertLayout, Part
from runtime.model.quantised.quantised_matrix import PLAIN
from runtime.model.quantised.quantised_tensor import QuantisedTensor, Tensors


@dataclass(frozen=True, slots=True)
class LocatedExperts:
    """Result of `locate_experts`: the layout of an expert in a slot, the stored bytes of every
    expert, `extents[key]`, the stored matrices of each table that can be read by row, in the order
    of their rows, and the other tensors of the model."""

    layout: ExpertLayout
    extents: tuple[tuple[Extent, ...], ...]
    tables: Mapping[str, Sequence[StoredTensor | QuantisedTensor]]
    others: Tensors


def locate_experts(
    model: PreTrainedModel,
    layers: tuple[MoeLayer, ...],
    *,
    shape: Shape,
    layout: ExpertLayout,
    tensors: Tensors,
    mapping: Sequence[WeightTransform] | None = None,
    tables: Container[str] = (),
) -> LocatedExperts:
    """Find every expert's bytes among `tensors`, stored as fused [E, ...] or as one tensor per
    expert and projection.

    `layout` is the one of the module's own numbers, in which experts lie unless they are quantised.
    `mapping` leads from stored names to the model's, by default as in the model's own checkpoints.
    `tables` are the names of parameters that are read by row where they are stored so.

    Raises BadInput, which names the tensor, for a missing or surplus expert, a wrong shape, and a
    layout whose conversion is more than copying.
    """
    names = _Names(model, get_model_conversion_mapping(model) if mapping is None else mapping)
    search = _Search(shape, layout, layers)
    others = {}
    by_row = defaultdict(list)
    # in the loader's order: some renamings depend on it
    for name in sorted(tensors, key=dot_natural_key):
        target, converter, source = names.target(name)
        place = search.places.get(target)
        is_whole = converter is None or is_stack(converter)
        if target in tables and is_whole and has_rows(tensors[name]):
            by_row[target].append(tensors[name])
        elif place is None:
            others[name] = tensors[name]
        elif converter is None or is_swap(converter):
            search.add_fused(*place, tensors[name], converter)
        elif is_joined(converter):
            by_turns = takes_turns(converter)
            search.add_fused(
                *place,
                tensors[name],
                sources=converter.source_patterns,
                source=source,
                by_turns=by_turns,
            )
        else:
            search.add_one(*place, tensors[name], converter, source, names.renamed(name))
    if len(others) == len(tensors):
        raise BadInput(
            f"no tensor of the checkpoint has the name of an expert, as {layers[0].name} ..., but "
            f"names are as {min(others, default='')[:80]}: they are another model's, or were "
            "changed when it was saved"
        )
    return LocatedExperts(*search.complete(), by_row, others)


class _Names:
    """Maps stored names to the model's parameters. It uses private functions of transformers, hence
    the pinned version."""

    def __init__(self, model: PreTrainedModel, mapping: Sequence[WeightTransform]) -> None:
        self._prefix = model.base_model_prefix
        self._state = model.state_dict()
        self._renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
        self._by_source = {
            source: rule for rule in self._converters for source in rule.source_patterns
        }

    def target(self, name: str) -> tuple[str, WeightConverter | None, str]:
        """Return the parameter that the tensor becomes, its converter, and the converter's pattern
        that it matched."""
        target, source = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._state
        )
        if target not in self._state and name in self._state:
            return name, None, ""
        return (target, None, "") if source is None else (target, self._by_source[source], source)

    def renamed(self, name: str) -> str:
        for rule in self._renamings:
            name, _ = rule.rename_source_key(name)
        return name


class _Slice(NamedTuple):
    """One expert's part of a stored tensor: a matrix that is not quantised, or one component of a
    quantised one. `turn` is 0 or 1 if its rows are every second one of a matrix, from the first or
    the second on."""

    role: str
    format: Format | None
    tensor: StoredTensor
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    swapped: tuple[int, ...] | None = None
    turn: int | None = None

    def part(self, name: str, source: int, dtype: torch.dtype) -> Part:
        """Return the part of a slot that this slice becomes. There, numbers that are not quantised
        have the module's dtype."""
        kept_as = (
            dtype
            if self.format is None
            else torch.int32
            if self.role == ORDER
            else self.tensor.dtype
        )
        shape = self.shape if self.turn is None else (2 * self.shape[0], *self.shape[1:])
        return Part(name, kept_as, shape, role=self.role, source=source, format=self.format)

    def extent(self, start: int, stop: int, dtype: torch.dtype) -> Extent:
        stored = self.tensor.shard, self.tensor.dtype, self.offset, self.nbytes
        if self.turn is None:
            return Extent(*stored, start, stop, dtype, swapped=self.swapped)
        start += self.turn * (stop - start) // (2 * self.shape[0])
        return Extent(*stored, start, stop, dtype, num_rows=self.shape[0])


class _Search:
    """The slices found so far: `_slices[key][part, i]` is source i of the n that make up that
    part's rows."""

    def __init__(self, shape: Shape, layout: ExpertLayout, layers: tuple[MoeLayer, ...]) -> None:
        self._shape = shape
        self._layers = layers
        self._layout = layout
        self._is_transposed = layers[0].experts.is_transposed
        self._slices: list[dict[tuple[str, int], list[_Slice]]] = [
            {} for _ in range(shape.num_keys)
        ]
        self._sources = {
            (layer.index, part.name): (part.name,) for layer in layers for part in layout.parts
        }
        self.places = {
            f"{layer.name}.{part.name}": (layer, part) for layer in layers for part in layout.parts
        }

    def add_fused(
        self,
        layer: MoeLayer,
        part: Part,
        tensor: StoredTensor | QuantisedTensor,
        swap: WeightConverter | None = None,
        *,
        sources: Sequence[str] = ("",),
        source: str = "",
        by_turns: bool = False,
    ) -> None:
        """Add a tensor [E, ...] whose slice e is the part of expert e, transposed or in pairs by
        `swap`. With n `sources` it is one of them: its rows follow those of the others, or are
        taken `by_turns` with them."""
        is_quantised = isinstance(tensor, QuantisedTensor)
        shape = (
            tuple(reversed(part.shape)) if self._is_transposed and is_quantised else part.shape
        )  # quantised matrices are [out, in]
        turns = swap is not None and is_turned(swap, tensor, shape)
        rows, *columns = reversed(shape) if turns else shape
        _check_shape(tensor, (self._shape.num_experts, rows // len(sources), *columns))
        swapped = stored_shape(swap, tensor, is_turned=turns)
        index = sources.index(source)
        if len(sources) > 1:
            self._sources[layer.index, part.name] = tuple(sources)
        for expert in range(self._shape.num_experts):
            self._slices[self._key(layer, expert)][part.name, index] = [
                slice_._replace(
                    offset=slice_.offset + expert * slice_.nbytes // self._shape.num_experts,
                    nbytes=slice_.nbytes // self._shape.num_experts,
                    shape=slice_.shape[1:],
                    swapped=swapped,
                    format=Turned(slice_.format) if turns and is_quantised else slice_.format,
                    turn=index if by_turns else None,
                )
                for slice_ in _whole(tensor)
            ]

    def add_one(
        self,
        layer: MoeLayer,
        part: Part,
        tensor: StoredTensor | QuantisedTensor,
        converter: WeightConverter,
        source: str,
        renamed: str,
    ) -> None:
        """Add a tensor of one expert: source i of n fills the i-th of n equal blocks of the part's
        rows."""
        check_plain(converter, tensor.name)
        sources = tuple(converter.source_patterns)
        self._sources[layer.index, part.name] = sources
        index = sources.index(source)
        rows = part.shape[0] // len(sources)
        _check_shape(tensor, (rows, *part.shape[1:]))
        expert = self._expert(layer, tensor.name, source, renamed)
        self._slices[self._key(layer, expert)][part.name, index] = _whole(tensor)

    def complete(self) -> tuple[ExpertLayout, tuple[tuple[Extent, ...], ...]]:
        """Return the layout and the extents by key; BadInput for the first expert that lacks a
        slice."""
        for layer in self._layers:
            for expert in range(self._shape.num_experts):
                self._check_complete(layer, expert)
        if any(
            slice_.format
            for slices in self._slices
            for found in slices.values()
            for slice_ in found
        ):
            return self._quantised()
        return self._layout, tuple(tuple(self._plain(key)) for key in range(self._shape.num_keys))

    def _plain(self, key: int) -> Iterator[Extent]:
        """Yield the extents of an expert that is not quantised: the sources of a part fill equal
        blocks of it."""
        layer = key // self._shape.num_experts
        for part in self._layout.parts:
            count = len(self._sources[layer, part.name])
            for index in range(count):
                (slice_,) = self._slices[key][part.name, index]
                nbytes = part.nbytes // count
                start = part.offset + index * nbytes
                yield slice_.extent(start, start + nbytes, self._layout.dtype)

    def _quantised(self) -> tuple[ExpertLayout, tuple[tuple[Extent, ...], ...]]:
        """Return the layout and the extents. If not all experts are stored alike, the layout holds
        every way in which some are."""
        parts = [self._parts(key) for key in range(self._shape.num_keys)]
        ways = dict.fromkeys(parts)
        layouts = {
            each: ExpertLayout.stored(
                each,
                self._layout.dtype,
                is_transposed=self._is_transposed,
                start=ALIGNMENT if len(ways) > 1 else 0,
            )
            for each in ways
        }
        if len(layouts) == 1:
            (layout,) = layouts.values()
            return layout, tuple(self._packed(key, layout) for key in range(len(parts)))
        numbers = {each: RepeatedBytes(bytes([number])) for number, each in enumerate(layouts)}
        mixed = ExpertLayout((), self._layout.dtype, variants=tuple(layouts.values()))
        return mixed, tuple(
            (
                Extent(numbers[each], torch.uint8, 0, 1, 0, 1, torch.uint8),
                *self._packed(key, layouts[each]),
            )
            for key, each in enumerate(parts)
        )

    def _packed(self, key: int, layout: ExpertLayout) -> tuple[Extent, ...]:
        """Return the extents of an expert with this layout."""
        extents = []
        parts = iter(layout.parts)
        for _, _, slice_ in self._in_order(key):
            if slice_.turn != 1:
                part = next(parts)
            extents.append(slice_.extent(part.offset, part.stop, part.dtype))
        return tuple(extents)

    def _parts(self, key: int) -> tuple[Part, ...]:
        """Return the parts of an expert as it is stored. Raises BadInput if two tensors whose rows
        are taken by turns have different types."""
        parts: list[Part] = []
        for name, index, slice_ in self._in_order(key):
            part = slice_.part(name, 0 if slice_.turn else index, self._layout.dtype)
            if slice_.turn != 1:
                parts.append(part)
            elif part != parts[-1]:
                raise BadInput(
                    f"{slice_.tensor.name} is of another type than its other half: take a file of "
                    "one type"
                )
        return tuple(parts)

    def _in_order(self, key: int) -> Iterator[tuple[str, int, _Slice]]:
        layer = key // self._shape.num_experts
        for part in self._layout.parts:
            for index in range(len(self._sources[layer, part.name])):
                for slice_ in self._slices[key][part.name, index]:
                    yield part.name, index, slice_

    def _check_complete(self, layer: MoeLayer, expert: int) -> None:
        slices = self._slices[self._key(layer, expert)]
        for part in self._layout.parts:
            for index, source in enumerate(self._sources[layer.index, part.name]):
                if (part.name, index) not in slices:
                    raise BadInput(
                        f"layer {layer.index}, expert {expert}: {_projection(source)} is missing "
                        f"from the checkpoint ({layer.name}): download it again"
                    )

    def _expert(self, layer: MoeLayer, name: str, source: str, renamed: str) -> int:
        number = re.search(source.replace("*.", r"(\d+)\."), renamed)
        expert = int(number.group(1)) if number else self._shape.num_experts
        if expert >= self._shape.num_experts:
            raise BadInput(
                f"{name} in the checkpoint is one expert too many: by its config a layer has "
                f"{self._shape.num_experts}"
            )
        return expert

    def _key(self, layer: MoeLayer, expert: int) -> int:
        return layer.index * self._shape.num_experts + expert


def _whole(tensor: StoredTensor | QuantisedTensor) -> list[_Slice]:
    """Return the whole of a tensor as slices, one for each of its components."""
    if isinstance(tensor, QuantisedTensor):
        slices = []
        for stored_role, each in tensor.components.items():
            role, form, shape = in_slot(stored_role, tensor.format, each.shape)
            slices.append(_Slice(role, form, each, each.offset, each.nbytes, shape))
        return slices
    return [_Slice(PLAIN, None, tensor, tensor.offset, tensor.nbytes, tensor.shape)]


def _check_shape(tensor: StoredTensor | QuantisedTensor, expected: Iterable[int]) -> None:
    if tensor.shape != tuple(expected):
        raise BadInput(
            f"{tensor.name} has shape {list(tensor.shape)} where the config asks for "
            f"{list(expected)}: config and weights are not of the same model"
        )


def _projection(source: str) -> str:
    """`mlp.experts.*.up_proj.weight` -> `up_proj.weight`; `\\.ffn_up_exps\\.weight` ->
    `ffn_up_exps.weight`."""
    return source.rpartition("*.")[2].replace("\\", "").removeprefix(".")
