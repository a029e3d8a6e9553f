"""Copies from the device to the host: what policies must see of a step, and the tokens of the near tier."""

import numpy as np
import torch
from torch import nn

from runtime.control.plan import Place
from runtime.model.arithmetic import Assigned, gather
from runtime.tiers.near import NearTier


class HostCopy:
    """The one device-to-host copy of a step. Everything goes in one piece, into a page-locked buffer that is kept; the
    host waits for an event of this copy alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0)
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    def __call__(self, tensors: list[torch.Tensor]) -> list[np.ndarray]:
        """[T, *] tensors as arrays: the first, of ids, as int64 and the others as float32."""
        if self._device.type == "cpu":
            return [tensor.detach().numpy() for tensor in tensors]
        return separated(self._fetch(joined(tensors)), [tensor.shape[1] for tensor in tensors])

    def _fetch(self, values: torch.Tensor) -> np.ndarray:
        """Copy `values` to the host; the next call overwrites the result."""
        if self._buffer.numel() < values.numel():
            self._buffer = torch.empty(values.numel(), pin_memory=True)
        host = self._buffer[: values.numel()].view(values.shape)
        host.copy_(values, non_blocking=True)
        self._done.record(torch.cuda.current_stream(self._device))
        self._done.synchronize()
        return host.numpy()


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All in one tensor [T, sum of widths] float32; the first, of ids, as the bits of int32."""
    ids, *others = tensors
    return torch.cat([ids.int().view(torch.float32), *others], dim=1)


def separated(values: np.ndarray, widths: list[int]) -> list[np.ndarray]:
    """Copies of what `joined` took: ids as int64, the others as float32."""
    ids, *others = np.split(values, np.cumsum(widths)[:-1], axis=1)
    return [np.ascontiguousarray(ids).view(np.int32).astype(np.int64), *map(np.array, others)]


def real_rows(mask: torch.Tensor | None, batch: int, length: int) -> np.ndarray | None:
    """Rows of the flattened batch that are not padding; None when all are real, or for a mask of another kind."""
    if length == 1 or mask is None or mask.dim() != 2 or mask.shape[0] != batch:  # a decoded token is never padding
        return None
    real = mask[:, -length:].reshape(-1).cpu().numpy().astype(bool)
    return None if real.all() else np.flatnonzero(real)


def near_forward(
    near: NearTier, module: nn.Module, place: Place, host: torch.Tensor, assigned: Assigned, device: torch.device
) -> torch.Tensor:
    """Compute one expert in the near tier on its tokens of `host` [T, H]: [t, H] on `device`."""
    on_host = assigned if assigned.tokens is None else Assigned(assigned.tokens.cpu(), assigned.ranks.cpu())
    return near.forward(module, place, gather(host, on_host)).to(device, non_blocking=True)
