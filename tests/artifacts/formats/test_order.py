"""Codes that were put into the order of their groups are the same numbers, to the bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.formats.base import Format, Stored, Unfit
from artifacts.formats.gptq import Gptq
from artifacts.formats.numbers import numbers
from artifacts.formats.order import INDEX, INPUT_BITS, ORDER, arrange, index_of, placed, require_index
from artifacts.formats.packed_integers import PackedIntegers
from tests.helpers.published import gptq, packed

FORMATS = {
    **{f"gptq of {bits} bits": (Gptq(bits=bits), gptq, bits) for bits in (2, 3, 4, 8)},
    **{f"packed integers of {bits} bits": (PackedIntegers(bits=bits), packed, bits) for bits in (4, 8)},
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
    """Groups of one size in any order, or any numbers of groups."""
    num_groups = draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    even = random.permutation(np.arange(num_groups * GROUP) // GROUP)
    return even if draw(st.booleans()) else random.integers(0, num_groups, len(even))


@settings(max_examples=12)
@given(index=indices(), rows=st.sampled_from([32, 64, 160]))
@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_the_stored_matrix(name: str, rows: int, index: np.ndarray) -> None:
    form, stored = made(name, rows, index)
    moved, exact = in_slot(stored), form.dequantise(stored)
    assert arrange(moved)
    order = moved[ORDER].numpy()
    assert (np.diff(order) > 0).all() and np.array_equal(index[order & INPUT], order >> INPUT_BITS)
    assert torch.equal(index_of(moved[ORDER]), stored[INDEX])
    assert torch.equal(form.dequantise(moved), exact)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(numbers(form, moved, dtype), exact.to(dtype))
    assert form.is_sound(moved)


@pytest.mark.parametrize("name", FORMATS)
def test_the_codes_of_a_group_follow_each_other(name: str) -> None:
    """As a matrix whose groups were never in another order has them."""
    index = np.random.default_rng(0).permutation(np.arange(96) // GROUP)
    form, stored = made(name, 64, index)
    moved, exact = in_slot(stored), form.dequantise(stored)
    assert arrange(moved)
    del stored[INDEX]
    plain = {role: moved[role] for role in stored}
    assert torch.equal(form.dequantise(plain), exact[:, np.argsort(index, kind="stable")])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("index", [np.arange(96) // GROUP, np.repeat(0, 96)], ids=["even", "all in one"])
def test_groups_that_follow_each_other_stay(name: str, index: np.ndarray) -> None:
    _, stored = made(name, 64, index)
    moved = in_slot(stored)
    assert arrange(moved)
    assert all(torch.equal(moved[role], tensor) for role, tensor in stored.items() if role != INDEX)


def test_only_compressed_tensors_says_by_minus_one_that_groups_follow_each_other() -> None:
    results = {}
    for name in ("gptq of 4 bits", "packed integers of 4 bits"):
        form, stored = made(name, 64, np.full(96, -1))
        moved = in_slot(stored)
        results[name] = arrange(moved)
    assert results == {"gptq of 4 bits": False, "packed integers of 4 bits": True}
    assert torch.equal(form.dequantise(moved), form.dequantise(stored))
    found = placed(moved, 96, 3)
    assert found.are_even and not found.are_moved


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("number", [-1, 3, 2**31 - 1])
def test_a_number_of_no_group_is_seen(name: str, number: int) -> None:
    index = np.arange(96) // GROUP
    index[50] = number
    assert not arrange(in_slot(made(name, 64, index)[1]))


def test_an_index_of_other_inputs_or_of_too_many_is_refused() -> None:
    with pytest.raises(Unfit, match="g_idx is not of 64 inputs"):
        require_index({INDEX: Stored(torch.int32, (63,))}, 64, 2)
    with pytest.raises(Unfit, match="2 groups of 1048577 inputs in any order, more than moectl reads"):
        require_index({INDEX: Stored(torch.int32, ((1 << INPUT_BITS) + 1,))}, (1 << INPUT_BITS) + 1, 2)
    assert not require_index({}, 64, 2)
