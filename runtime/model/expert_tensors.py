"""Which stored bytes belong to which expert, in both checkpoint layouts, by transformers' own conversion rules."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from artifacts.errors import BadInput
from artifacts.shape import Shape
from runtime.model.checkpoint import StoredTensor
from runtime.model.expert_store import Extent
from runtime.model.layers import MoeLayer
from runtime.model.layout import ExpertLayout, Part


@dataclass(frozen=True, slots=True)
class LocatedExperts:
    """The stored bytes of every expert, `extents[key]`, and the stored tensors of the rest of the model."""

    extents: tuple[tuple[Extent, ...], ...]
    others: dict[str, StoredTensor]


def locate_experts(
    model: PreTrainedModel,
    layers: tuple[MoeLayer, ...],
    *,
    shape: Shape,
    layout: ExpertLayout,
    tensors: dict[str, StoredTensor],
) -> LocatedExperts:
    """Find every expert's bytes among `tensors`, stored as fused [E, ...] or as one tensor per expert and projection.

    Raises BadInput, which names the tensor, for a missing or surplus expert, a wrong shape, and a layout whose
    conversion is more than copying.
    """
    names = _Names(model)
    search = _Search(shape, layout, layers)
    others = {}
    for name in sorted(tensors, key=dot_natural_key):  # in the loader's order: some renamings depend on it
        target, converter, source = names.target(name)
        place = search.places.get(target)
        if place is None:
            others[name] = tensors[name]
        elif converter is None:
            search.add_fused(*place, tensors[name])
        else:
            search.add_one(*place, tensors[name], converter, source, names.renamed(name))
    return LocatedExperts(search.complete(), others)


class _Names:
    """Maps stored names to the model's parameters, by private functions of transformers: hence its pinned version."""

    def __init__(self, model: PreTrainedModel) -> None:
        mapping = get_model_conversion_mapping(model)
        self._prefix, self._state = model.base_model_prefix, model.state_dict()
        self._renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
        self._by_source = {source: rule for rule in self._converters for source in rule.source_patterns}

    def target(self, name: str) -> tuple[str, WeightConverter | None, str]:
        """Return the parameter that the tensor becomes, its converter, and the converter's pattern that it matched."""
        target, source = rename_source_key(name, self._renamings, self._converters, self._prefix, self._state)
        if target not in self._state and name in self._state:
            return name, None, ""
        return (target, None, "") if source is None else (target, self._by_source[source], source)

    def renamed(self, name: str) -> str:
        for rule in self._renamings:
            name, _ = rule.rename_source_key(name)
        return name


class _Search:
    """The extents found so far: `_extents[key][part, i]` is source i of the n that make up that part."""

    def __init__(self, shape: Shape, layout: ExpertLayout, layers: tuple[MoeLayer, ...]) -> None:
        self._shape, self._layers, self._layout = shape, layers, layout
        self._extents: list[dict[tuple[str, int], Extent]] = [{} for _ in range(shape.num_keys)]
        self._sources = {(layer.index, part.name): (part.name,) for layer in layers for part in layout.parts}
        self.places = {f"{layer.name}.{part.name}": (layer, part) for layer in layers for part in layout.parts}

    def add_fused(self, layer: MoeLayer, part: Part, tensor: StoredTensor) -> None:
        """Add a tensor [E, ...], whose e-th slice is expert e."""
        _check_shape(tensor, (self._shape.num_experts, *part.shape))
        stride = tensor.nbytes // self._shape.num_experts
        for expert in range(self._shape.num_experts):
            extent = Extent(
                tensor.shard,
                tensor.dtype,
                tensor.offset + expert * stride,
                stride,
                part.offset,
                part.offset + part.nbytes,
            )
            self._extents[self._key(layer, expert)][part.name, 0] = extent

    def add_one(
        self, layer: MoeLayer, part: Part, tensor: StoredTensor, converter: WeightConverter, source: str, renamed: str
    ) -> None:
        """Add a tensor of one expert: source i of n fills the i-th of n equal blocks of the part's rows."""
        _check_plain(converter, tensor.name)
        sources = tuple(converter.source_patterns)
        self._sources[layer.index, part.name] = sources
        index, rows = sources.index(source), part.shape[0] // len(sources)
        _check_shape(tensor, (rows, *part.shape[1:]))
        expert = self._expert(layer, tensor.name, source, renamed)
        nbytes = part.nbytes // len(sources)
        start = part.offset + index * nbytes
        extent = Extent(tensor.shard, tensor.dtype, tensor.offset, tensor.nbytes, start, start + nbytes)
        self._extents[self._key(layer, expert)][part.name, index] = extent

    def complete(self) -> tuple[tuple[Extent, ...], ...]:
        """Return the extents by key; BadInput for the first expert that lacks one."""
        for layer in self._layers:
            for expert in range(self._shape.num_experts):
                self._check_complete(layer, expert)
        return tuple(tuple(extents.values()) for extents in self._extents)

    def _check_complete(self, layer: MoeLayer, expert: int) -> None:
        extents = self._extents[self._key(layer, expert)]
        for part in self._layout.parts:
            for index, source in enumerate(self._sources[layer.index, part.name]):
                if (part.name, index) not in extents:
                    raise BadInput(
                        f"layer {layer.index}, expert {expert}: {_projection(source)} is missing from the checkpoint "
                        f"({layer.name}): download it again"
                    )

    def _expert(self, layer: MoeLayer, name: str, source: str, renamed: str) -> int:
        number = re.search(source.replace("*.", r"(\d+)\."), renamed)
        expert = int(number.group(1)) if number else self._shape.num_experts
        if expert >= self._shape.num_experts:
            raise BadInput(
                f"{name} in the checkpoint is one expert too many: by its config a layer has {self._shape.num_experts}"
            )
        return expert

    def _key(self, layer: MoeLayer, expert: int) -> int:
        return layer.index * self._shape.num_experts + expert


def _check_shape(tensor: StoredTensor, expected: Iterable[int]) -> None:
    if tensor.shape != tuple(expected):
        raise BadInput(
            f"{tensor.name} has shape {list(tensor.shape)} where the config asks for {list(expected)}: "
            "config and weights are not of the same model"
        )


def _check_plain(converter: WeightConverter, name: str) -> None:
    """Raise BadInput unless the conversion copies bytes unchanged: it stacks experts, then at most joins rows."""
    kinds = [(type(step), step.dim) for step in converter.operations if isinstance(step, MergeModulelist | Concatenate)]
    plain = [(MergeModulelist, 0), (Concatenate, 1)][: len(converter.operations)]
    if kinds != plain or len(kinds) != len(converter.operations):
        raise BadInput(f"{name} is stored in a way that moectl cannot read expert by expert ({converter.operations})")


def _projection(source: str) -> str:
    """`mlp.experts.*.up_proj.weight` -> `up_proj.weight`."""
    return source.rpartition("*.")[2]
