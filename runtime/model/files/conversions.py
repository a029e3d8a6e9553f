"""Predicates on transformers' conversion rules: the effect of one rule, read by itself, on the
experts of a checkpoint."""

from transformers.core_model_loading import (
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from artifacts.errors import BadInput
from runtime.model.files.checkpoint import StoredTensor
from runtime.model.quantised.quantised_tensor import QuantisedTensor


def is_swap(converter: WeightConverter) -> bool:
    """Return whether the conversion swaps two dimensions of every expert: those of its matrix, or
    those of its rows grouped in pairs."""
    if len(converter.operations) != 1 or len(converter.source_patterns) != 1:
        return False
    (step,) = converter.operations
    if isinstance(step, Transpose):
        return {step.dim0, step.dim1} == {1, 2}
    return isinstance(step, Interleave) and step.dim == 1 and not step.inverse


def is_turned(
    swap: WeightConverter, tensor: StoredTensor | QuantisedTensor, shape: tuple[int, ...]
) -> bool:
    """Return whether this tensor [E, ...] is stored transposed. Some rules transpose every tensor,
    others depend on its shape."""
    (step,) = swap.operations
    return isinstance(step, Transpose) and not (step.check_dims and tensor.shape[1:] == shape)


def stored_shape(
    swap: WeightConverter | None, tensor: StoredTensor | QuantisedTensor, *, is_turned: bool
) -> tuple[int, ...] | None:
    """Return the stored shape of one expert if the module has the first two dimensions swapped,
    else None. Raises BadInput for a quantised tensor with its rows in pairs."""
    is_quantised = isinstance(tensor, QuantisedTensor)
    if is_turned:
        return None if is_quantised else tensor.shape[1:]
    if swap is None or not isinstance(swap.operations[0], Interleave):
        return None
    if is_quantised:
        raise BadInput(
            f"{tensor.name} has its rows in pairs and in few bits: moectl reads one or the other"
        )
    return (tensor.shape[1] // 2, 2, *tensor.shape[2:])


def check_plain(converter: WeightConverter, name: str) -> None:
    """Raise BadInput unless the conversion copies bytes unchanged: it stacks experts, then at most
    joins rows."""
    kinds = [
        (type(step), step.dim)
        for step in converter.operations
        if isinstance(step, MergeModulelist | Concatenate)
    ]
    plain = [(MergeModulelist, 0), (Concatenate, 1)][: len(converter.operations)]
    if kinds != plain or len(kinds) != len(converter.operations):
        raise BadInput(
            f"{name} is stored in a way that moectl cannot read expert by expert "
            f"({converter.operations})"
        )


def is_joined(converter: WeightConverter) -> bool:
    """Return whether the conversion only joins the rows of tensors [E, ...], one after another or
    by turns, and no source is a single expert's tensor."""
    first, *others = converter.operations
    is_join = (
        isinstance(first, Concatenate) and first.dim == 1 and (not others or takes_turns(converter))
    )
    return is_join and not any("*" in source for source in converter.source_patterns)


def is_stack(converter: WeightConverter) -> bool:
    """Return whether the conversion only joins the rows of matrices, one after another."""
    return all(isinstance(step, Concatenate) and step.dim == 0 for step in converter.operations)


def takes_turns(converter: WeightConverter) -> bool:
    """Return whether the conversion joins the rows of two tensors [E, ...] and then takes them by
    turns (interleaved)."""
    *_, last = converter.operations
    is_turning = isinstance(last, Interleave) and last.dim == 1 and last.inverse
    return is_turning and len(converter.operations) == len(converter.source_patterns) == 2
