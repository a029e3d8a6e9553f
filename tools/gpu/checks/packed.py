"""Checks of the kernels for a token's experts of few bits, packed or in trellis codes, against the
unpacked weights."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn import functional as F

from artifacts.quantisation.packing import PARTS, Packed
from artifacts.quantisation.trellis import trellis
from artifacts.quantisation.trellis.trellis import Trellis
from artifacts.quantisation.widths import SCALAR_WIDTHS, Width
from runtime.backends.triton.forms_gpu import replica_form
from runtime.kernels.gpu.addressing import RankNumbers
from runtime.kernels.low_bit import dequantise
from runtime.kernels.replica_linear import project_replica
from runtime.tiers.replica_layouts import Rate, ReplicaLayout, TrellisLayout, replica_part
from tools.gpu.checks.low_bit import random_packed
from tools.gpu.checks.sessions import Finding
from tools.gpu.checks.trellis import random_trellis
from tools.gpu.timing import microseconds

# relative to the outputs with the same weights in float32, by norm
BITS = SCALAR_WIDTHS
ALLOWED = 5e-3
CODED: tuple[Width, ...] = (0.6, 1.25, 2, 4)
_CALLS = 100
_UNPACKED = 2  # experts in trellis codes that are unpacked for comparison, a second each
_NAMES = "gate_up_proj", "down_proj"

Expert = dict[str, Packed | Trellis]


class Replicas:
    """Random experts of one width, consecutive in a buffer as in slots, which tokens select in
    turn."""

    def __init__(
        self,
        sizes: tuple[int, int, int, int],
        bits: Width,
        *,
        turns: int,
        device: str,
        is_coded: bool = False,
    ) -> None:
        self.hidden, neurons, self.top_k, _ = sizes
        self._device = device
        self._num_unpacked = _UNPACKED if is_coded else self.top_k
        shapes = dict(
            zip(_NAMES, ((2 * neurons, self.hidden), (self.hidden, neurons)), strict=True)
        )
        make = _coded if is_coded else _packed
        self._experts = [make(shapes, bits, seed, device) for seed in range(self.top_k * turns)]
        layout = replica_layout(
            self._experts[0], bits, {name: shape[1] for name, shape in shapes.items()}
        )
        buffer = torch.cat([laid_out(expert, layout, device) for expert in self._experts])
        size = len(buffer) // len(self._experts)
        self._views = [layout.views(expert) for expert in buffer.split(size)]
        self._form = replica_form(layout, buffer, range(0, len(buffer), size), is_by_key=False)

    def together(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        """Outputs [K, H] of one token [1, H] by the kernels for it."""
        y = torch.empty(self.top_k, self.hidden, device=self._device)
        self._form.multiply(x, RankNumbers.of(range(turn * self.top_k, (turn + 1) * self.top_k)), y)
        return y

    def each(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        """The same with a kernel for each matrix."""
        inner, down = _NAMES
        multiply = partial(project_replica, SimpleNamespace(has_bias=False))
        views = self._views[turn * self.top_k : (turn + 1) * self.top_k]
        return torch.cat([multiply(one, down, _gated(multiply(one, inner, x))) for one in views])

    def unpacked(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs by the unpacked weights, of the token's experts or the first of them."""
        matrices = (map(_unpacked, one.values()) for one in self._experts[: self._num_unpacked])
        return torch.cat(
            [_gated(x @ gate_up.to(x).mT) @ down.to(x).mT for gate_up, down in matrices]
        )


def packed(
    device: str, sizes: tuple[int, int, int, int], *, turns: int = 4, calls: int = _CALLS
) -> Finding:
    """Passed if outputs of every width agree with the unpacked weights; microseconds in bfloat16
    beside a kernel for each matrix."""
    return _compared(
        {bits: Replicas(sizes, bits, turns=turns, device=device) for bits in BITS},
        turns,
        calls,
        device,
    )


def coded(
    device: str, sizes: tuple[int, int, int, int], *, turns: int = 4, calls: int = _CALLS
) -> Finding:
    """The same for trellis codes of some widths."""
    cases = {
        bits: Replicas(sizes, bits, turns=turns, device=device, is_coded=True) for bits in CODED
    }
    return _compared(cases, turns, calls, device)


def _compared(cases: dict[Width, Replicas], turns: int, calls: int, device: str) -> Finding:
    relative = {}
    figures = {}
    hidden = next(iter(cases.values())).hidden
    x = torch.randn(1, hidden, generator=torch.Generator(device).manual_seed(0), device=device)
    narrow = x.to(torch.bfloat16)
    for bits, case in cases.items():
        theirs = case.unpacked(x)
        ours = case.together(x, 0)[: len(theirs)]
        relative[f"{bits} bits"] = ((ours - theirs).norm() / theirs.norm()).item()
        ours_us, each_us = (
            microseconds(lambda turn, way=way: way(narrow, turn), turns, calls, device)
            for way in (case.together, case.each)
        )
        figures[f"{bits} bits"] = {"us": ours_us, "each_us": each_us}
    told = ", ".join(
        f"{name} {one['us']:.0f} us, {one['each_us']:.0f} each" for name, one in figures.items()
    )
    worst = max(relative.values())
    return (
        worst <= ALLOWED,
        f"largest relative difference {worst:.1e}; {told}",
        {"relative": relative, **figures},
    )


def _gated(inner: torch.Tensor) -> torch.Tensor:
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


def _packed(shapes: dict[str, tuple[int, int]], bits: int, seed: int, device: str) -> Expert:
    return {
        name: random_packed(*shape, bits, seed=seed, device=device)
        for name, shape in shapes.items()
    }


def _coded(shapes: dict[str, tuple[int, int]], bits: Width, seed: int, device: str) -> Expert:
    """Return random codes on the CPU, where they are unpacked. Outputs of down are rotated."""
    expert = {}
    for name, shape in shapes.items():
        is_rotated = name == _NAMES[1]
        rate = trellis.fitting(*shape, bits, is_rotated=is_rotated)
        expert[name] = random_trellis(*shape, *rate, is_rotated=is_rotated, seed=seed)
    return expert


def _unpacked(matrix: Packed | Trellis) -> torch.Tensor:
    return matrix.dequantised() if isinstance(matrix, Trellis) else dequantise(matrix)


def replica_layout(expert: Expert, bits: Width, num_inputs: dict[str, int]) -> ReplicaLayout:
    """The layout of replica files, wide types first, for matrices by name."""
    tensors = [
        (f"{name}.{part}", one)
        for name, matrix in expert.items()
        for part, one in _parts(matrix).items()
    ]
    tensors = sorted(tensors, key=lambda pair: -pair[1].itemsize)
    ends = np.cumsum([one.nbytes for _, one in tensors]).tolist()
    parts = tuple(
        replica_part(name, one.dtype, tuple(one.shape), end - one.nbytes)
        for (name, one), end in zip(tensors, ends, strict=True)
    )
    own = bits, parts, num_inputs
    rates = {
        name: Rate(one.half_bits, one.state_bits, one.num_outputs)
        for name, one in expert.items()
        if isinstance(one, Trellis)
    }
    return TrellisLayout(*own, rates) if rates else ReplicaLayout(*own)


def laid_out(expert: Expert, layout: ReplicaLayout, device: str) -> torch.Tensor:
    """The matrices as they lie in a slot, uint8."""
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
    for part in layout.parts:
        content = getattr(expert[part.name], part.role).contiguous().view(torch.uint8).flatten()
        part.bytes_of(buffer).copy_(content)
    return buffer


def _parts(matrix: Packed | Trellis) -> dict[str, torch.Tensor]:
    """The tensors of a matrix by name."""
    names = trellis.PARTS if isinstance(matrix, Trellis) else PARTS
    return {name: one for name in names if (one := getattr(matrix, name)) is not None}
