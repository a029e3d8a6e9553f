"""The rotations of `artifacts.quantisation.trellis.rotation` on a GPU, as products with their small
factors, in float32."""

from functools import cache

import torch

from artifacts.quantisation.trellis.rotation import cosines, factors, signs

_MOST = 64  # rows of a Hadamard matrix that is multiplied at once


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Return U x of each row of x [t, n]: float32."""
    length = x.shape[1]
    return _transformed(x.float() * _constant("signs", length, x.device), length, is_back=False)


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """Return U^T x of each row of x [t, n]: float32."""
    length = x.shape[1]
    return _transformed(x.float(), length, is_back=True) * _constant("signs", length, x.device)


def _transformed(x: torch.Tensor, length: int, *, is_back: bool) -> torch.Tensor:
    odd, power = factors(length)
    outer = max(1, power // _MOST)
    parts = x.view(-1, odd, outer, power // outer)
    if power > 1:
        parts = parts @ _constant("hadamard", power // outer, x.device)
    if outer > 1:
        parts = _hadamard_of(outer, x.device) @ parts
    if odd > 1:
        matrix = _constant("cosines", odd, x.device)
        parts = (matrix.mT if is_back else matrix) @ parts.reshape(-1, odd, power)
    return parts.reshape(x.shape)


def _hadamard_of(size: int, device: torch.device) -> torch.Tensor:
    return _constant("hadamard", size, device)


@cache
def _constant(name: str, size: int, device: torch.device) -> torch.Tensor:
    if name == "hadamard":
        matrix = torch.ones(1, 1)
        while len(matrix) < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return (matrix / size**0.5).to(device)
    return torch.tensor((signs if name == "signs" else cosines)(size)).to(device)
