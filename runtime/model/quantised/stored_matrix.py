"""A matrix of a published format as compiled code reads it: where its codes, scales, zero-points,
order and bias lie in an expert, and what its codes mean.

GPU kernels are compiled for these descriptions: sizes and places are constants in them. All places
are in bytes from the expert's beginning, all distances in elements of the type that is read.
"""

from dataclasses import dataclass

import torch

from artifacts.formats.base import PlacedTensors, StoredCodes, StoredScales, StoredZeros
from artifacts.formats.integers.order import ORDER
from runtime.model.layout import ExpertLayout, Part, PlacedParts
from runtime.model.quantised.quantised_matrix import PLAIN

_ZEROS = "zero_point"  # a role whose type the format leaves open; compiled code reads int32


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Matrix [out, in]. Without `zeros` the zero-point of `integer` codes is half their range.
    `bias` is the place of the numbers that are added to a product. `order` is the place of the
    group and the input of each place, None if inputs are at their own places and groups follow each
    other."""

    num_outputs: int
    num_inputs: int
    codes: StoredCodes
    scales: StoredScales | None = None
    zeros: StoredZeros | None = None
    bias: int | None = None
    order: int | None = None


def is_described(part: Part) -> bool:
    """Return whether compiled code can read a tensor: of a format that describes itself, with
    zero-points in words."""
    has_words = part.role != _ZEROS or part.dtype is torch.int32
    return part.format is not None and part.format.described is not None and has_words


def stored_matrices(layout: ExpertLayout, name: str) -> list[StoredMatrix]:
    """Describe the matrices that are the rows of one parameter of an expert, with its bias."""
    biases = layout.matrices.get(f"{name}_bias")
    bias = biases and biases[0][PLAIN].offset
    return [stored_matrix(placed, bias) for placed in layout.matrices[name]]


def stored_matrix(placed: PlacedParts, bias: int | None = None) -> StoredMatrix:
    """Describe a matrix by its tensors."""
    form = next(iter(placed.values())).format
    if form is None:
        shape = placed[PLAIN].shape
        codes = PlacedTensors(placed, *shape).codes(PLAIN, "plain", 0)
        return StoredMatrix(*shape, codes, bias=bias)
    shape = form.shape(placed)
    described = form.described(PlacedTensors(placed, *shape))
    order = placed[ORDER].offset if ORDER in placed else None
    return StoredMatrix(*shape, *described, bias=bias, order=order)
