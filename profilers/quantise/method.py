"""The quantisation method of a model's experts, and its check against the model's shapes."""

from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import nn

from artifacts.errors import BadUsage
from artifacts.quantisation import gptq
from artifacts.quantisation.gptq import group_size_for
from artifacts.quantisation.packing import packed_shapes
from artifacts.quantisation.replica_file import FORMAT, TRELLIS_FORMAT
from artifacts.quantisation.replicas import in_memory
from artifacts.quantisation.trellis.trellis import ENCODER, fitting, trellis_shapes
from artifacts.quantisation.widths import SCALAR_WIDTHS, TRELLIS_WIDTHS, USUAL_WIDTHS, Width, listed
from runtime.model.layers import MoeLayer
from runtime.model.open import MoeModel

TRELLIS = "trellis"
PLAIN, REFINED = gptq.RECIPES
RECIPES = (*gptq.RECIPES, TRELLIS)
DOWN = "down_proj"

Shapes = dict[str, tuple[int, int]]  # outputs and inputs of one expert's projections, by name


@dataclass(frozen=True, slots=True)
class Method:
    """Widths, group size, damping and recipe; trellis codes have no groups. The loss of an expert
    with fewer than `min_samples` tokens is measured on its layer's sample too."""

    bits: tuple[Width, ...] = USUAL_WIDTHS
    group_size: int = 128
    damp: float = 0.01
    recipe: str = "refined"
    min_samples: int = 64


def first_projection(module: nn.Module) -> str:
    """Return the name of the projection that reads the expert's input."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def projections(layer: MoeLayer) -> Shapes:
    """Return the outputs and inputs of an expert's projections, by name."""
    module = layer.experts
    shapes = layer.shapes
    names = (first_projection(module), "down_proj")
    return {name: shapes[name][::-1] if module.is_transposed else shapes[name] for name in names}


def widths_of(recipe: str) -> tuple[Width, ...]:
    """Return the widths that a recipe makes."""
    return TRELLIS_WIDTHS if recipe == TRELLIS else SCALAR_WIDTHS


def made_by(recipe: str) -> dict[str, object]:
    """Return the format of a recipe's files and the version of its solver."""
    if recipe == TRELLIS:
        return {"format": TRELLIS_FORMAT, "solver": ENCODER}
    return {"format": FORMAT, "solver": gptq.VERSION}


def check_method(method: Method, shapes: Shapes) -> None:
    """Raise BadUsage for widths, a recipe, damping or a group size that is not available."""
    if method.recipe not in RECIPES:
        raise BadUsage(f"the recipe is {listed(RECIPES, last=' or ')}, not {method.recipe!r}")
    widths = widths_of(method.recipe)
    if not method.bits or not set(method.bits) <= set(widths):
        named = listed(widths, last=" or ")
        raise BadUsage(
            f"replicas of the recipe {method.recipe} have {named} bits, not "
            f"{listed(method.bits) or 'none'}"
        )
    if not 0 < method.damp < 1:
        raise BadUsage(
            "damp is a share of the mean of the Hessian's diagonal, between 0 and 1, not "
            f"{method.damp}"
        )
    if method.recipe == TRELLIS:
        return
    misfits = [name for name, (_, num_inputs) in shapes.items() if num_inputs % method.group_size]
    # the usual sizes are replaced by a smaller one where they do not divide the inputs
    if misfits and method.group_size not in gptq.GROUP_SIZES:
        sizes = " and ".join(f"{num_inputs} ({name})" for name, (_, num_inputs) in shapes.items())
        common = np.gcd.reduce([num_inputs for _, num_inputs in shapes.values()])
        usable = [size for size in range(8, int(common) + 1) if common % size == 0]
        raise BadUsage(
            f"groups of {method.group_size} do not divide the inputs of the experts' projections, "
            f"{sizes}: give {', '.join(map(str, usable))}, or 32, 64 or 128, which give way to "
            "less where they do not divide"
        )


def no_smaller(method: Method, opened: MoeModel) -> tuple[int, ...]:
    """Return the widths whose replicas take no fewer bytes than an expert takes in the
    checkpoint."""
    first = opened.layers[0]
    biases = sum(prod(shape) for name, shape in first.shapes.items() if name.endswith("_bias"))
    nbytes = {
        bits: in_memory(
            expected_nbytes(replace(method, bits=(bits,)), projections(first))
            + biases * opened.dtype.itemsize
        )
        for bits in widths_of(method.recipe)
    }
    return tuple(bits for bits, size in nbytes.items() if size >= opened.stored_shape.expert_nbytes)


def smaller(method: Method, opened: MoeModel) -> Method:
    """Return the method without widths that would not be smaller than the checkpoint. Raises
    BadUsage where none is left."""
    larger = no_smaller(method, opened)
    left = tuple(bits for bits in method.bits if bits not in larger)
    if not left:
        raise BadUsage(
            f"replicas of {', '.join(map(str, method.bits))} bits are no smaller than the experts "
            f"of the checkpoint ({opened.expert_format}): give fewer --bits"
        )
    return replace(method, bits=left)


def expected_nbytes(method: Method, shapes: Shapes) -> int:
    """Return the bytes of one expert's replicas, without biases."""
    return sum(
        dtype.itemsize * int(np.prod(shape))
        for bits in method.bits
        for name, (num_outputs, num_inputs) in shapes.items()
        for dtype, shape in _tensors(method, bits, name, num_outputs, num_inputs).values()
    )


def _tensors(
    method: Method, bits: Width, name: str, num_outputs: int, num_inputs: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return type and shape of each tensor of a projection's replica."""
    if method.recipe == TRELLIS:
        is_rotated = name == DOWN
        rate = fitting(num_outputs, num_inputs, bits, is_rotated=is_rotated)
        return trellis_shapes(num_outputs, num_inputs, *rate, is_rotated=is_rotated)
    return packed_shapes(
        num_outputs, num_inputs, bits, group_size_for(num_inputs, method.group_size)
    )
