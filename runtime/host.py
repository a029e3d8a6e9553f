"""What crosses from the device to the host, and which rows of it are tokens."""

import numpy as np
import torch

from runtime.experts import Assigned


def real_rows(mask: torch.Tensor | None, batch: int, length: int) -> np.ndarray | None:
    """Rows of the flattened batch that are no padding; None when all are, or when the mask is of another kind."""
    if length == 1 or mask is None or mask.dim() != 2 or mask.shape[0] != batch:  # what is decoded is no padding
        return None
    real = mask[:, -length:].reshape(-1).cpu().numpy().astype(bool)
    return None if real.all() else np.flatnonzero(real)


def on_host(assigned: Assigned) -> Assigned:
    return assigned if assigned.tokens is None else Assigned(assigned.tokens.cpu(), assigned.ranks.cpu())


def to_host(tensors: list[torch.Tensor]) -> list[np.ndarray]:
    """The one device-to-host copy of a step: [T, *] tensors as arrays, ids as int64 and the rest as float32."""
    if tensors[0].device.type == "cpu":
        return [tensor.detach().numpy() for tensor in tensors]
    ids, *others = tensors
    packed = torch.cat([ids.int().view(torch.float32), *others], dim=1).cpu().numpy()
    ends = np.cumsum([tensor.shape[1] for tensor in tensors])[:-1]
    selected, *rest = np.split(packed, ends, axis=1)
    return [np.ascontiguousarray(selected).view(np.int32).astype(np.int64), *map(np.ascontiguousarray, rest)]
