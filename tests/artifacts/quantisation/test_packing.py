"""Streams of codes: the words of the published layout, and round trips."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifacts.quantisation.packing import PARTS, Packed, pack, packed_shapes, unpack
from artifacts.quantisation.widths import SCALAR_WIDTHS

GOLDEN = {
    1: ["aaaaaaaa"],
    2: ["e4e4e4e4"] * 2,
    3: ["88fac688", "c688fac6", "fac688fa"],
    4: ["76543210", "fedcba98"] * 2,
    8: [
        "03020100",
        "07060504",
        "0b0a0908",
        "0f0e0d0c",
        "13121110",
        "17161514",
        "1b1a1918",
        "1f1e1d1c",
    ],
}


@pytest.mark.parametrize("bits", SCALAR_WIDTHS)
def test_words_are_those_of_the_published_layout(bits: int) -> None:
    codes = (np.arange(32) % 2**bits).astype(np.uint8)[:, None]
    assert [f"{word:08x}" for word in pack(codes, bits).view(np.uint32)[:, 0]] == GOLDEN[bits]


@given(
    st.integers(0, 10**6), st.sampled_from(SCALAR_WIDTHS), st.integers(1, 100), st.integers(1, 5)
)
def test_what_is_packed_comes_back(seed: int, bits: int, count: int, width: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (count, width), dtype=np.uint8)
    words = pack(codes, bits)
    assert words.dtype == np.int32 and words.shape == (-(-count * bits // 32), width)
    assert np.array_equal(unpack(words, bits, count), codes)
    stream = np.unpackbits(words[:, 0].copy().view(np.uint8), bitorder="little")
    assert not stream[count * bits :].any()


@given(
    st.sampled_from(SCALAR_WIDTHS),
    st.integers(1, 70),
    st.integers(1, 4),
    st.sampled_from([8, 32, 96]),
)
def test_sizes_are_known_without_data(
    bits: int, num_outputs: int, num_groups: int, group_size: int
) -> None:
    num_inputs = num_groups * group_size
    shapes = packed_shapes(num_outputs, num_inputs, bits=bits, group_size=group_size)
    assert list(shapes) == [name for name in PARTS if bits > 1 or name != "qzeros"]
    parts = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()}
    packed = Packed(
        bits, group_size, num_inputs, parts["qweight"], parts["scales"], parts.get("qzeros")
    )
    assert packed.num_outputs == num_outputs
    assert packed.nbytes == sum(part.nbytes for part in parts.values())
    assert packed.qweight.shape == pack(np.zeros((num_inputs, num_outputs), np.uint8), bits).shape
