"""Memory without Python's collector, which finds cycles late: it counts objects and not bytes."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the collector off, so that what is in a cycle stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def live_nbytes() -> int:
    """Bytes of all tensors in the CPU's memory that Python has not freed."""
    tensors = [
        one for one in gc.get_objects() if type(one) is torch.Tensor and one.device.type == "cpu"
    ]
    return sum(
        {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors
        }.values()
    )
