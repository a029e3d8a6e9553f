"""Checks of the kernels for a token's packed experts: every width against the unpacked weights."""

import numpy as np
import torch
from torch.nn import functional as F

from artifacts.quantisation.packing import PARTS, Packed
from artifacts.quantisation.widths import SCALAR_WIDTHS
from runtime.engine.forms_gpu import packed_matrix
from runtime.kernels.gpu.addressing import WORD
from runtime.model.layout import Part
from runtime.tiers.replica_layouts import ReplicaLayout
from tools.gpu.checks.low_bit import random_packed
from tools.gpu.checks.sessions import Finding
from tools.gpu.timing import microseconds

BITS, ALLOWED = SCALAR_WIDTHS, 5e-3  # relative to the outputs with the same weights in float32, by norm
_CALLS = 100


class Replicas:
    """Random experts of one width, consecutive in a buffer as in slots, which tokens select in turn."""

    def __init__(self, sizes: tuple[int, int, int, int], bits: int, *, turns: int, device: str) -> None:
        self.hidden, neurons, self.top_k, _ = sizes
        self._bits, self._device = bits, device
        shapes = {"gate_up_proj": (2 * neurons, self.hidden), "down_proj": (self.hidden, neurons)}
        found = [
            {name: random_packed(*shape, bits, seed=seed, device=device) for name, shape in shapes.items()}
            for seed in range(self.top_k * turns)
        ]
        layout = replica_layout(found[0], bits, {name: shape[1] for name, shape in shapes.items()})
        self._views = [tuple(one.values()) for one in found]
        self._buffer = torch.cat([laid_out(one, layout) for one in found])
        self._starts = torch.arange(len(found), device=device) * (layout.nbytes // WORD)
        self._matrices = [packed_matrix(layout, name) for name in shapes]
        self._ids = torch.arange(self.top_k, device=device, dtype=torch.int32)[None]

    def together(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        """Outputs [K, H] of one token [1, H] by the kernels for it."""
        from runtime.kernels.gpu.gated_packed import multiply

        y, (gate_up, down) = torch.empty(self.top_k, self.hidden, device=self._device), self._matrices
        starts = self._starts[turn * self.top_k :]
        multiply(x, self._ids, starts, self._buffer, bits=self._bits, gate_up=gate_up, down=down, y=y)
        return y

    def each(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        """The same with a kernel for each matrix."""
        from runtime.kernels.low_bit import linear

        views = self._views[turn * self.top_k : (turn + 1) * self.top_k]
        return torch.cat([linear(_gated(linear(x, gate_up)), down) for gate_up, down in views])

    def unpacked(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs by the unpacked weights, for the first token."""
        from runtime.kernels.low_bit import dequantise

        matrices = (tuple(map(dequantise, views)) for views in self._views[: self.top_k])
        return torch.cat([_gated(x @ gate_up.mT) @ down.mT for gate_up, down in matrices])


def packed(device: str, sizes: tuple[int, int, int, int], *, turns: int = 4, calls: int = _CALLS) -> Finding:
    """Passed if outputs of every width agree with the unpacked weights; microseconds in bfloat16 beside a kernel for
    each matrix."""
    relative, figures = {}, {}
    x = torch.randn(1, sizes[0], generator=torch.Generator(device).manual_seed(0), device=device)
    narrow = x.to(torch.bfloat16)
    for bits in BITS:
        case = Replicas(sizes, bits, turns=turns, device=device)
        ours, theirs = case.together(x, 0), case.unpacked(x)
        relative[f"{bits} bits"] = ((ours - theirs).norm() / theirs.norm()).item()
        ours_us, each_us = (
            microseconds(lambda turn, way=way: way(narrow, turn), turns, calls, device)
            for way in (case.together, case.each)
        )
        figures[f"{bits} bits"] = {"us": ours_us, "each_us": each_us}
    told = ", ".join(f"{name} {one['us']:.0f} us, {one['each_us']:.0f} each" for name, one in figures.items())
    worst = max(relative.values())
    return worst <= ALLOWED, f"largest relative difference {worst:.1e}; {told}", {"relative": relative, **figures}


def _gated(inner: torch.Tensor) -> torch.Tensor:
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


def replica_layout(expert: dict[str, Packed], bits: int, num_inputs: dict[str, int]) -> ReplicaLayout:
    """The layout of replica files, wide types first, for matrices by name."""
    tensors = [(f"{name}.{part}", getattr(packed, part)) for name, packed in expert.items() for part in PARTS]
    tensors = sorted(((name, one) for name, one in tensors if one is not None), key=lambda pair: -pair[1].itemsize)
    ends = np.cumsum([one.nbytes for _, one in tensors]).tolist()
    parts = [
        Part(name, tuple(one.shape), end - one.nbytes, one.nbytes)
        for (name, one), end in zip(tensors, ends, strict=True)
    ]
    return ReplicaLayout(bits, tuple(parts), tuple(one.dtype for _, one in tensors), num_inputs)


def laid_out(expert: dict[str, Packed], layout: ReplicaLayout) -> torch.Tensor:
    """The matrices as they lie in a slot, uint8 on their device."""
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device=next(iter(expert.values())).qweight.device)
    for part in layout.parts:
        name, _, own = part.name.partition(".")
        content = getattr(expert[name], own).contiguous().view(torch.uint8).flatten()
        buffer[part.offset : part.offset + part.nbytes] = content
    return buffer
