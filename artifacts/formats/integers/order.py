"""Groups of inputs that do not follow each other: as checkpoints store them (`g_idx`), and as they
lie in slots.

In a slot, codes lie in the order of their groups, and within a group in the order of their inputs.
Kernels multiply them as if groups had always followed each other. There `order` stands for `g_idx`:
for each place the group times 2^20 plus the input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from artifacts.common.lazy_torch import torch
from artifacts.formats.base import BEYOND, DAMAGED, Stored, loops, require

INDEX = "g_idx"
ORDER = "order"
ARRANGED = (ORDER, "qweight", "qzeros", "scales", "packed", "scale")
"""The roles of the tensors that `arrange` takes."""
NO_NUMBER = -(1 << 40)
"""A number that no index holds."""
INPUT_BITS = 20
_MOST_INPUTS = 1 << INPUT_BITS
_MOST_GROUPS = 1 << 31 - INPUT_BITS


class Placed(NamedTuple):
    """The group of each place, and the place of each input, both int64 [in]. `are_even` is true
    where groups of one size follow each other by place, `are_moved` where a place differs from its
    input."""

    groups: torch.Tensor
    places: torch.Tensor
    are_even: bool
    are_moved: bool


def require_index(stored: Mapping[str, Stored], num_inputs: int, num_groups: int) -> bool:
    """Return whether there is an index of groups. Raises Unfit if it does not fit these inputs and
    groups."""
    indexed = stored.get(INDEX, stored.get(ORDER))
    if indexed is None:
        return False
    require(indexed.shape == (num_inputs,), f"g_idx is not of {num_inputs} inputs")
    fits = num_inputs <= _MOST_INPUTS and num_groups <= _MOST_GROUPS
    require(
        fits, f"{num_groups} groups of {num_inputs} inputs in any order, more than moectl reads"
    )
    return True


def placed(
    tensors: Mapping[str, torch.Tensor], num_inputs: int, num_groups: int, lacking: int
) -> Placed:
    """Return the places of the inputs and their groups in a matrix with these tensors by role. An
    index says nothing if all its numbers are `lacking`."""
    own = torch.arange(num_inputs, device=next(iter(tensors.values())).device)
    groups = own // -(-num_inputs // num_groups)
    places = own
    are_even = num_inputs % num_groups == 0
    are_moved = False
    if ORDER in tensors:
        order = tensors[ORDER].long()
        places = torch.empty_like(own).index_copy_(0, order & _MOST_INPUTS - 1, own)
        are_even = are_even and torch.equal(order >> INPUT_BITS, groups)
        are_moved = not torch.equal(places, own)
        groups = order >> INPUT_BITS
    elif has_index(tensors, lacking):
        groups = tensors[INDEX].long()
        are_even = False
    return Placed(groups, places, are_even, are_moved)


def has_index(tensors: Mapping[str, torch.Tensor], lacking: int) -> bool:
    """Return whether there is a stored index that gives the groups of the inputs: not all its
    numbers are `lacking`."""
    return INDEX in tensors and not bool((tensors[INDEX].long() == lacking).all())


def fault_of_index(
    tensors: Mapping[str, torch.Tensor],
    num_inputs: int,
    num_groups: int,
    group_size: int | None,
    lacking: int,
) -> str | None:
    """The fault of an index, stored or in a slot, that leads beyond the groups, or whose groups
    have not this size, but for a smaller last one; 0 is one group, None any size."""
    groups = placed(tensors, num_inputs, num_groups, lacking).groups
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        return BEYOND
    counts = torch.bincount(groups, minlength=num_groups)
    size = int(counts[0]) if group_size is None else group_size or num_inputs
    if bool((counts[:-1] != size).any()) or int(counts[-1]) > size:
        sizes = f"{int(counts.min())} to {int(counts.max())}"
        return f"a g_idx with {sizes} inputs in a group where each has {size}, {DAMAGED}"
    return None


def index_of(order: torch.Tensor) -> torch.Tensor:
    """`g_idx` of int32 from `order`."""
    return torch.empty_like(order).index_copy_(
        0, order.long() & _MOST_INPUTS - 1, order >> INPUT_BITS
    )


def arrange(tensors: Mapping[str, torch.Tensor], lacking: int) -> bool:
    """Put the codes of a matrix on a CPU into the order of their groups, in place; `order`, int32,
    is `g_idx` as it was stored, and says nothing where every number is `lacking`. Return False
    where it leads beyond the groups."""
    order = tensors[ORDER].numpy()
    own = loops("integers.order_loops")
    if "qweight" in tensors:
        words = tensors["qweight"].numpy()
        num_groups = len(tensors["scales"])
        move = own.move_columns
    else:
        words = tensors["packed"].numpy()
        num_groups = tensors["scale"].shape[1]
        move = own.move_rows
    found = own.sort(order, num_groups, lacking)
    if found == own.IN_ANOTHER_ORDER:
        move(words, order)
    return found != own.BEYOND
