"""Trellis codes: windows of circular streams, the hash, and the weights of both kinds of
columns."""

from statistics import NormalDist

import numpy as np
import pytest
import torch

from artifacts.quantisation.trellis import trellis
from artifacts.quantisation.trellis.rotation import rotate
from artifacts.quantisation.trellis.trellis import (
    HALF_BITS,
    STATE_BITS,
    Trellis,
    num_words,
    states,
    trellis_shapes,
)


def random_trellis(
    half_bits: int,
    num_high: int,
    *,
    num_outputs: int = 96,
    num_inputs: int = 40,
    is_rotated: bool = True,
    seed: int = 0,
) -> Trellis:
    rng = np.random.default_rng(seed)
    shapes = trellis_shapes(num_outputs, num_inputs, half_bits, num_high, is_rotated=is_rotated)
    is_high = np.zeros(num_inputs, bool)
    is_high[rng.permutation(num_inputs)[:num_high]] = True
    size = shapes["codes"][1][0]
    return Trellis(
        half_bits,
        STATE_BITS,
        num_outputs,
        codes=torch.from_numpy(rng.integers(0, 2**16, size, dtype=np.uint16).view(np.int16)),
        high=torch.from_numpy(np.packbits(is_high, bitorder="little")),
        scale=torch.tensor([0.02]),
        row_scales=None
        if is_rotated
        else torch.from_numpy(rng.integers(0, 40, num_outputs, dtype=np.uint8)),
        num_inputs=num_inputs,
    )


@pytest.mark.parametrize("half_bits", HALF_BITS)
@pytest.mark.parametrize("num_outputs", [32, 96])
def test_a_window_is_a_piece_of_the_circular_stream(half_bits: int, num_outputs: int) -> None:
    words = np.random.default_rng(1).integers(
        0, 2**16, (num_words(half_bits, num_outputs), 3), dtype=np.uint16
    )
    bits = np.unpackbits(words.view(np.uint8).reshape(len(words), 3, 2), axis=2, bitorder="little")
    stream = bits.transpose(1, 0, 2).reshape(3, -1)
    assert stream.shape[1] == half_bits * num_outputs // 2
    for row in range(num_outputs):
        window = np.roll(stream, -(half_bits * row // 2), axis=1)[:, :STATE_BITS]
        expected = window @ (1 << np.arange(STATE_BITS))
        np.testing.assert_array_equal(
            states(words.view(np.int16), half_bits, num_outputs, STATE_BITS)[row], expected
        )


@pytest.mark.parametrize("odd", [0, 1])
def test_states_choose_every_level_equally_often(odd: int) -> None:
    every = trellis.levels(np.arange(2**STATE_BITS), odd)
    assert every[1] == trellis.LEVELS[(37, 45)[odd] * (trellis.MULTIPLIER * 16 >> 10) % 64]
    np.testing.assert_array_equal(np.bincount(np.searchsorted(trellis.LEVELS, every)), 64)


def test_levels_are_the_medians_of_equal_parts_of_gaussian_numbers() -> None:
    expected = [NormalDist().inv_cdf((part + 0.5) / 64) for part in range(64)]
    np.testing.assert_array_equal(trellis.LEVELS, np.round(127 * np.array(expected) / expected[-1]))


@pytest.mark.parametrize("is_rotated", [True, False])
@pytest.mark.parametrize(("half_bits", "num_high"), [(1, 16), (2, 0), (3, 32), (8, 0)])
def test_weights_are_scaled_levels_rotated_back(
    half_bits: int, num_high: int, is_rotated: bool
) -> None:
    coded = random_trellis(half_bits, num_high, is_rotated=is_rotated)
    scale = np.full(96, 0.02) if is_rotated else 0.02 * 2.0 ** (coded.row_scales.numpy() / -32.0)
    expected = np.empty((96, 40))
    for bits, columns, words in coded.blocks():
        if len(columns):
            level = trellis.levels(
                states(words, bits, 96, STATE_BITS), (np.arange(96) % 2)[:, None]
            )
            expected[:, columns] = level * trellis.steps()[bits] * scale[:, None]
    inputs, outputs = (rotate(np.eye(n, dtype=np.float32)).T for n in (40, 96))
    expected = expected @ inputs
    expected = outputs.T @ expected if is_rotated else expected
    np.testing.assert_allclose(coded.dequantised().numpy(), expected, atol=1e-6)
    assert coded.is_high().sum() == num_high
    assert coded.nbytes == sum(
        part.nbytes for part in (coded.codes, coded.high, coded.scale)
    ) + 96 * (not is_rotated)
