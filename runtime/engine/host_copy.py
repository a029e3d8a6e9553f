"""What crosses from the device to the host, and which rows of it are tokens."""

import numpy as np
import torch

from runtime.model.arithmetic import Assigned


def real_rows(mask: torch.Tensor | None, batch: int, length: int) -> np.ndarray | None:
    """Rows of the flattened batch that are no padding; None when all are, or when the mask is of another kind."""
    if length == 1 or mask is None or mask.dim() != 2 or mask.shape[0] != batch:  # what is decoded is no padding
        return None
    real = mask[:, -length:].reshape(-1).cpu().numpy().astype(bool)
    return None if real.all() else np.flatnonzero(real)


def on_host(assigned: Assigned) -> Assigned:
    return assigned if assigned.tokens is None else Assigned(assigned.tokens.cpu(), assigned.ranks.cpu())


class HostCopy:
    """The one device-to-host copy of a step: everything in one piece, into page-locked memory that is kept, awaited by
    an event of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0)
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    def __call__(self, tensors: list[torch.Tensor]) -> list[np.ndarray]:
        """[T, *] tensors as arrays, ids, which come first, as int64 and the rest as float32."""
        if self._device.type == "cpu":
            return [tensor.detach().numpy() for tensor in tensors]
        return unpacked(self._fetch(packed(tensors)), [tensor.shape[1] for tensor in tensors])

    def _fetch(self, values: torch.Tensor) -> np.ndarray:
        """The host waits for this copy only; what it returns is overwritten by the next."""
        if self._buffer.numel() < values.numel():
            self._buffer = torch.empty(values.numel(), pin_memory=True)
        host = self._buffer[: values.numel()].view(values.shape)
        host.copy_(values, non_blocking=True)
        self._done.record(torch.cuda.current_stream(self._device))
        self._done.synchronize()
        return host.numpy()


def packed(tensors: list[torch.Tensor]) -> torch.Tensor:
    """[T, sum of widths] float32, the ids, which come first, as the bits of int32."""
    ids, *others = tensors
    return torch.cat([ids.int().view(torch.float32), *others], dim=1)


def unpacked(values: np.ndarray, widths: list[int]) -> list[np.ndarray]:
    """Copies of what was packed: ids as int64, the rest as float32."""
    ids, *others = np.split(values, np.cumsum(widths)[:-1], axis=1)
    return [np.ascontiguousarray(ids).view(np.int32).astype(np.int64), *map(np.array, others)]
