"""Copies from the device to the host arrive unchanged, and outlive the buffer of the copy."""

import numpy as np
import pytest
import torch

from runtime.engine.host_copy import HostCopy, joined, separated


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_ids_and_numbers_survive_one_buffer(num_tokens: int) -> None:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 60000, (num_tokens, 3), generator=random)
    ids[0, 0] = 2_143_289_344  # the bits of a NaN
    others = [torch.rand(num_tokens, width, generator=random) for width in (3, 8)]
    buffer = joined([ids, *others]).numpy()
    arrays = separated(buffer, [3, 3, 8])
    buffer[:] = 0
    assert arrays[0].dtype == np.int64 and np.array_equal(arrays[0], ids.numpy())
    for array, other in zip(arrays[1:], others, strict=True):
        assert array.dtype == np.float32 and np.array_equal(array, other.numpy())


def test_on_a_cpu_nothing_is_copied() -> None:
    ids, weights = torch.tensor([[3, 1]]), torch.tensor([[0.5, 0.25]])
    arrays = HostCopy(torch.device("cpu"))([ids, weights])
    assert arrays[0].ctypes.data == ids.data_ptr() and arrays[1].ctypes.data == weights.data_ptr()
