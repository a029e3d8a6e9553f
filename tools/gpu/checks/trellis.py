"""Checks of products with trellis codes: every rate against the reference, and its speed."""

import dataclasses

import numpy as np
import torch

from artifacts.quantisation.trellis.trellis import STATE_BITS, Trellis, trellis_shapes


def random_trellis(
    num_outputs: int,
    num_inputs: int,
    half_bits: int,
    num_high: int = 0,
    *,
    is_rotated: bool = True,
    device: str = "cpu",
    seed: int = 0,
) -> Trellis:
    """A matrix of random codes, quickly made, with `num_high` columns of half a bit more."""
    rng = np.random.default_rng(seed)
    shapes = trellis_shapes(num_outputs, num_inputs, half_bits, num_high, is_rotated=is_rotated)
    is_high = np.zeros(num_inputs, bool)
    is_high[rng.permutation(num_inputs)[:num_high]] = True
    words = rng.integers(0, 2**16, shapes["codes"][1], dtype=np.uint16).view(np.int16)
    row_scales = None if is_rotated else rng.integers(0, 40, num_outputs, dtype=np.uint8)
    tensors = {
        "codes": words,
        "high": np.packbits(is_high, bitorder="little"),
        "scale": np.full(1, 0.02, np.float32),
        "row_scales": row_scales,
    }
    on_device = {
        name: None if part is None else torch.from_numpy(part).to(device)
        for name, part in tensors.items()
    }
    return Trellis(half_bits, STATE_BITS, num_outputs, num_inputs=num_inputs, **on_device)


def copied(trellis: Trellis) -> Trellis:
    """A copy whose codes are at another place in memory."""
    return dataclasses.replace(trellis, codes=trellis.codes.clone())
