"""Matrices that a checkpoint stores in few bits, each in several tensors, found by the names of these."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import EllipsisType

import torch

from artifacts.errors import BadInput
from artifacts.formats.base import Format, Stored, Unfit
from artifacts.formats.numbers import numbers
from artifacts.formats.table import Quantisation, Spelling
from runtime.model.checkpoint import StoredTensor

_FEW_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8, torch.int32)
_OF_ACTIVATIONS = ("input_scale", "input_global_scale", "k_scale", "v_scale", "output_scale", "activation_scale")
_OF_WEIGHTS = ("_scale_inv", ".scales", ".qzeros", "weight_scale", "weight_scale_2", "weight_zero_point", "_blocks")


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """A matrix [out, in], or one of each expert [E, out, in], in few bits; `components` has its tensors by role."""

    name: str
    format: Format
    components: Mapping[str, StoredTensor]
    shape: tuple[int, ...]

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        """The numbers, float32, for `tensor[...]`, by which transformers' loader reads a lazy tensor. What is NaN in a
        scale or a weight is NaN in a number, which the loader's caller refuses."""
        assert index is Ellipsis, f"only [...] is supported, not {index}"
        tensors = {role: tensor.read() for role, tensor in self.components.items()}
        if len(self.shape) == 2:
            return numbers(self.format, tensors, torch.float32)
        each = ({role: tensor[row] for role, tensor in tensors.items()} for row in range(self.shape[0]))
        return torch.stack([numbers(self.format, of, torch.float32) for of in each])


Tensors = dict[str, StoredTensor | QuantisedTensor]


def gather_matrices(tensors: Mapping[str, StoredTensor], quantisation: Quantisation | None) -> Tensors:
    """The tensors of the model by the names of its parameters: those that hold one matrix together become one.

    Scales of activations are left out: products are computed on activations of the model's own dtype. Raises BadInput
    for weights of few bits without scales, for scales without weights, and for tensors that do not fit each other.
    """
    rest: Tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(_OF_ACTIVATIONS)}
    for spelling in quantisation.spellings if quantisation else ():
        for name, components in list(_found(spelling, rest)):
            for component in components.values():
                del rest[component.name]
            rest[name] = _quantised(name, spelling.format, components)
    for name, tensor in rest.items():
        _check_claimed(name, tensor, quantisation)
    return rest


def _found(spelling: Spelling, tensors: Tensors) -> Iterator[tuple[str, dict[str, StoredTensor]]]:
    """Each matrix of this spelling: its name, and its tensors by role."""
    role, suffix = next(iter(spelling.roles.items()))
    for anchor in tensors:
        if not anchor.endswith(suffix) or isinstance(tensors[anchor], QuantisedTensor):
            continue
        stem = anchor.removesuffix(suffix)
        components = {role: tensors.get(stem + ending) for role, ending in spelling.roles.items()}
        components = {role: tensor for role, tensor in components.items() if tensor is not None}
        if spelling.required <= set(components):
            yield (f"{stem}.weight" if spelling.is_module else stem), components
        elif suffix:
            missing = ", ".join(spelling.roles[role] for role in sorted(spelling.required - set(components)))
            raise BadInput(f"{anchor} is stored without {missing}: download the checkpoint again")


def _quantised(name: str, format: Format, components: dict[str, StoredTensor]) -> QuantisedTensor:
    """Check that the tensors fit each other, as those of one matrix or, with a dimension before, of one for each
    expert."""
    stored = {role: Stored(tensor.dtype, tensor.shape) for role, tensor in components.items()}
    leading = {tensor.shape[:1] for tensor in components.values()}
    try:
        return QuantisedTensor(name, format, components, format.shape(stored))
    except Unfit as problem:
        if len(leading) > 1 or leading == {()}:
            raise _unfit(name, format, problem) from problem
    sliced = {role: Stored(each.dtype, each.shape[1:]) for role, each in stored.items()}
    try:
        return QuantisedTensor(name, format, components, (*leading.pop(), *format.shape(sliced)))
    except Unfit as problem:
        raise _unfit(name, format, problem) from problem


def _unfit(name: str, format: Format, problem: Unfit) -> BadInput:
    return BadInput(f"{name} is no matrix in {format.name}: {problem}; download the checkpoint again")


def _check_claimed(name: str, tensor: StoredTensor | QuantisedTensor, quantisation: Quantisation | None) -> None:
    """Raise BadInput for a weight of few bits that has no scales, and for scales that have no weight."""
    if isinstance(tensor, QuantisedTensor):
        return
    by_config = f", quantised by {quantisation.method}" if quantisation else ", and config.json has no quantisation"
    if tensor.dtype in _FEW_BITS and len(tensor.shape) >= 2:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise BadInput(f"{name} is {dtype} without scales{by_config}: download the checkpoint again")
    if name.endswith(_OF_WEIGHTS):
        raise BadInput(f"{name} is a scale without its weight{by_config}: download the checkpoint again")
