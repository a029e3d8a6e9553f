"""Codes that were put into the order of their groups are the same numbers, to the bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.formats.base import Format, Stored, Unfit
from artifacts.formats.integers.gptq import Gptq
from artifacts.formats.integers.order import (
    INDEX,
    INPUT_BITS,
    ORDER,
    arrange,
    index_of,
    placed,
    require_index,
)
from artifacts.formats.integers.packed_integers import PackedIntegers
from artifacts.formats.numbers import numbers
from tests.helpers.published import gptq, packed

FORMATS = {
    **{f"gptq of {bits} bits": (Gptq(bits=bits), gptq, bits) for bits in (2, 3, 4, 8)},
    **{
        f"packed integers of {bits} bits": (PackedIntegers(bits=bits), packed, bits)
        for bits in (4, 8)
    },
}
GROUP = 32
INPUT = (1 << INPUT_BITS) - 1


def in_slot(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of stored tensors, as a load brings them to a slot."""
    return {ORDER if role == INDEX else role: tensor.clone() for role, tensor in tensors.items()}


def made(name: str, rows: int, index: np.ndarray) -> tuple[Format, dict[str, torch.Tensor]]:
    form, make, bits = FORMATS[name]
    tensors = make(rows, len(index), torch.Generator().manual_seed(0), bits=bits, group=GROUP)
    return form, tensors | {INDEX: torch.from_numpy(index.astype(np.int32))}


@st.composite
def indices(draw: st.DrawFn) -> np.ndarray:
    """Groups of one size in any order."""
    num_groups = draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    return random.permutation(np.arange(num_groups * GROUP) // GROUP)


@settings(max_examples=12)
@given(index=indices(), rows=st.sampled_from([32, 64, 160]))
@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_the_stored_matrix(name: str, rows: int, index: np.ndarray) -> None:
    form, stored = made(name, rows, index)
    moved = in_slot(stored)
    exact = form.dequantise(stored)
    assert arrange(moved, form.lacking)
    order = moved[ORDER].numpy()
    assert (np.diff(order) > 0).all() and np.array_equal(index[order & INPUT], order >> INPUT_BITS)
    assert torch.equal(index_of(moved[ORDER]), stored[INDEX])
    assert torch.equal(form.dequantise(moved), exact)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(numbers(form, moved, dtype), exact.to(dtype))
    assert form.fault(stored) is form.fault(moved) is None


@pytest.mark.parametrize("name", FORMATS)
def test_the_codes_of_a_group_follow_each_other(name: str) -> None:
    """As a matrix whose groups were never in another order has them."""
    index = np.random.default_rng(0).permutation(np.arange(96) // GROUP)
    form, stored = made(name, 64, index)
    moved = in_slot(stored)
    exact = form.dequantise(stored)
    assert arrange(moved, form.lacking)
    del stored[INDEX]
    plain = {role: moved[role] for role in stored}
    assert torch.equal(form.dequantise(plain), exact[:, np.argsort(index, kind="stable")])


@pytest.mark.parametrize("name", FORMATS)
def test_groups_that_follow_each_other_stay(name: str) -> None:
    form, stored = made(name, 64, np.arange(96) // GROUP)
    moved = in_slot(stored)
    assert arrange(moved, form.lacking)
    assert all(torch.equal(moved[role], tensor) for role, tensor in stored.items() if role != INDEX)


@pytest.mark.parametrize(
    ("name", "number"), [("gptq of 4 bits", 0), ("packed integers of 4 bits", -1)]
)
def test_an_index_that_says_nothing_stands_for_groups_that_follow_each_other(
    name: str, number: int
) -> None:
    form, stored = made(name, 64, np.full(96, number))
    moved = in_slot(stored)
    assert form.fault(stored) is None and arrange(moved, form.lacking) and form.fault(moved) is None
    plain = {role: tensor for role, tensor in stored.items() if role != INDEX}
    assert torch.equal(form.dequantise(stored), form.dequantise(plain))
    assert torch.equal(form.dequantise(moved), form.dequantise(plain))
    found = placed(moved, 96, 3, form.lacking)
    assert found.are_even and not found.are_moved


@pytest.mark.parametrize("name", FORMATS)
def test_an_index_whose_groups_are_not_of_one_size_is_seen(name: str) -> None:
    index = np.arange(96) // GROUP
    index[40] = 0
    form, stored = made(name, 64, index)
    moved = in_slot(stored)
    assert arrange(moved, form.lacking)
    for tensors in (stored, moved):
        assert form.fault(tensors).startswith("a g_idx with 31 to 33 inputs in a group")


def test_an_index_of_zeros_says_nothing_of_inputs_that_activations_order() -> None:
    _, stored = made("gptq of 4 bits", 64, np.repeat(0, 96))
    assert Gptq(is_permuted=True).fault(stored).startswith("a g_idx with 0 to 96 inputs in a group")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("number", [-1, 3, 2**31 - 1])
def test_a_number_of_no_group_is_seen(name: str, number: int) -> None:
    index = np.arange(96) // GROUP
    index[50] = number
    form, stored = made(name, 64, index)
    assert not arrange(in_slot(stored), form.lacking)
    assert form.fault(stored).startswith("an index beyond its groups")


def test_an_index_of_other_inputs_or_of_too_many_is_refused() -> None:
    with pytest.raises(Unfit, match="g_idx is not of 64 inputs"):
        require_index({INDEX: Stored(torch.int32, (63,))}, 64, 2)
    with pytest.raises(
        Unfit, match="2 groups of 1048577 inputs in any order, more than moectl reads"
    ):
        require_index(
            {INDEX: Stored(torch.int32, ((1 << INPUT_BITS) + 1,))}, (1 << INPUT_BITS) + 1, 2
        )
    assert not require_index({}, 64, 2)
