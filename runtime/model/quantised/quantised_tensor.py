"""Matrices that a checkpoint stores in few bits, each in several tensors that are found by their
names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import EllipsisType

import torch

from artifacts.errors import BadInput
from artifacts.formats.base import Format, Stored, Unfit
from artifacts.formats.integers.gptq import ZEROS, Gptq
from artifacts.formats.numbers import numbers
from artifacts.formats.schemes import Spelling
from artifacts.formats.stated import Stated
from runtime.model.files.checkpoint import RepeatedBytes, StoredTensor

_FEW_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8, torch.int32)
_OF_ACTIVATIONS = (
    "activation_scale",
    "input_global_scale",
    "input_scale",
    "input_zero_point",
    "k_scale",
    "output_scale",
    "q_scale",
    "v_scale",
)
_OF_WEIGHTS = (
    "_blocks",
    "_global_scale",
    "_packed",
    "_scale_inv",
    ".g_idx",
    ".qweight",
    ".qzeros",
    ".scales",
    "proj_scales",
    "weight_g_idx",
    "weight_scale",
    "weight_scale_2",
    "weight_shape",
    "weight_zero_point",
)


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """A matrix [out, in], or one for each expert [E, out, in], in few bits; `components` has its
    tensors by role."""

    name: str
    format: Format
    components: Mapping[str, StoredTensor]
    shape: tuple[int, ...]

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        """Return the numbers, float32, for `tensor[...]`, by which transformers' loader reads a
        lazy tensor."""
        assert index is Ellipsis, f"only [...] is supported, not {index}"
        tensors = {role: tensor.read() for role, tensor in self.components.items()}
        if len(self.shape) == 2:
            return self._numbers(tensors)
        rows = (
            {role: tensor[row] for role, tensor in tensors.items()} for row in range(self.shape[0])
        )
        return torch.stack([self._numbers(each) for each in rows])

    def check_first(self) -> None:
        """Raise BadInput for a fault of the only matrix, or of the first."""
        components = (
            self.components.values()
            if len(self.shape) == 2
            else map(_first, self.components.values())
        )
        self._check(
            {role: each.read() for role, each in zip(self.components, components, strict=True)}
        )

    def _numbers(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        self._check(tensors)
        return numbers(self.format, tensors, torch.float32)

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if fault := self.format.fault(tensors):
            raise BadInput(f"{self.name} holds {fault}")


Tensors = dict[str, StoredTensor | QuantisedTensor]


def gather_matrices(tensors: Mapping[str, StoredTensor], quantisation: Stated | None) -> Tensors:
    """Return the tensors of the model by the names of its parameters; tensors that hold one matrix
    together become one.

    Scales of activations are left out: products are computed on activations of the model's own
    dtype. The first matrix of each format is read, so that numbers that contradict the config are
    seen now. Raises BadInput for weights of few bits without scales, for scales without weights,
    and for tensors that do not fit each other or the config.
    """
    rest: Tensors = {
        name: tensor for name, tensor in tensors.items() if not name.endswith(_OF_ACTIVATIONS)
    }
    for spelling in quantisation.spellings if quantisation else ():
        form = None
        for name, stem, components in list(_found(quantisation, spelling, rest)):
            for ending in spelling.roles.values():
                rest.pop(stem + ending, None)
            is_first = form is None
            form = form or _settled(spelling, components)
            rest[name] = _quantised(name, form, _completed(spelling, form, components))
            if is_first:
                rest[name].check_first()
    # weights first: the line names one of them
    for name in sorted(rest, key=lambda name: name.endswith(_OF_WEIGHTS)):
        _check_claimed(name, rest[name], quantisation)
    return rest


def _found(
    quantisation: Stated, spelling: Spelling, tensors: Tensors
) -> Iterator[tuple[str, str, dict[str, StoredTensor]]]:
    """Yield each matrix of this spelling: its name, the prefix of its tensors' names, and the
    tensors by role. An empty tensor counts as missing if it may be missing."""
    suffix = spelling.anchor
    for anchor in tensors:
        if not anchor.endswith(suffix) or isinstance(tensors[anchor], QuantisedTensor):
            continue
        stem = anchor.removesuffix(suffix)
        if not quantisation.is_spelled(stem.removesuffix(".weight"), spelling):
            continue
        components = {role: tensors.get(stem + ending) for role, ending in spelling.roles.items()}
        components = {
            role: tensor
            for role, tensor in components.items()
            if tensor is not None and (tensor.nbytes or role in spelling.required)
        }
        if spelling.required <= set(components):
            yield (f"{stem}.weight" if spelling.is_module else stem), stem, components
        elif suffix:
            missing = ", ".join(
                spelling.roles[role] for role in sorted(spelling.required - set(components))
            )
            raise BadInput(f"{anchor} is stored without {missing}: download the checkpoint again")


def _settled(spelling: Spelling, components: Mapping[str, StoredTensor]) -> Format:
    """Return the format of a spelling as the first matrix shows it."""
    zeros = components.get(ZEROS)
    is_read = ZEROS in spelling.optional and zeros is not None and len(zeros.shape) >= 2
    return spelling.format.settled(zeros.read().flatten(0, -2)) if is_read else spelling.format


def _completed(
    spelling: Spelling, form: Format | Gptq, components: dict[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return the tensors of a matrix, with zero-points added if they are all one number and the
    file lacks them."""
    if ZEROS not in spelling.optional or ZEROS in components:
        return components
    scales = components["scales"]
    row = form.row_of_zeros(scales.shape[-1] if scales.shape else 0)
    shape = (*scales.shape[:-1], len(row) // 4)
    zeros = StoredTensor(scales.name, torch.int32, shape, RepeatedBytes(row), 0, 4 * prod(shape))
    return components | {ZEROS: zeros}


def _first(tensor: StoredTensor) -> StoredTensor:
    return replace(tensor, shape=tensor.shape[1:], nbytes=tensor.nbytes // tensor.shape[0])


def _quantised(name: str, format: Format, components: dict[str, StoredTensor]) -> QuantisedTensor:
    """Check that the tensors fit each other, as those of one matrix or, with a dimension in front,
    of one matrix for each expert."""
    leading = {tensor.shape[:1] for tensor in components.values()}
    try:
        return QuantisedTensor(name, format, components, format.shape(components))
    except Unfit as problem:
        if len(leading) > 1 or leading == {()}:
            raise _unfit(name, format, problem) from problem
    sliced = {role: Stored(each.dtype, each.shape[1:]) for role, each in components.items()}
    try:
        return QuantisedTensor(name, format, components, (*leading.pop(), *format.shape(sliced)))
    except Unfit as problem:
        raise _unfit(name, format, problem) from problem


def _unfit(name: str, format: Format, problem: Unfit) -> BadInput:
    return BadInput(
        f"{name} is no matrix in {format.name}: {problem}; download the checkpoint again"
    )


def _check_claimed(
    name: str, tensor: StoredTensor | QuantisedTensor, quantisation: Stated | None
) -> None:
    """Raise BadInput for a weight of few bits that has no scales, and for scales that have no
    weight."""
    if isinstance(tensor, QuantisedTensor):
        return
    by_config = (
        f", quantised by {quantisation.method}"
        if quantisation
        else ", and config.json has no quantisation"
    )
    if tensor.dtype in _FEW_BITS and len(tensor.shape) >= 2:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise BadInput(
            f"{name} is {dtype} without scales{by_config}: download the checkpoint again"
        )
    if name.endswith(_OF_WEIGHTS):
        raise BadInput(
            f"{name} belongs to no matrix that is whole{by_config}: download the checkpoint again"
        )
