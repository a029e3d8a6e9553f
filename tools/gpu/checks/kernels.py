"""The checks of `tools.gpu.check` for the experts' kernels, with one token and with prompts:
answers and times."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from tools.gpu.checks.sessions import Finding
from tools.gpu.timing import gbps, host_microseconds, microseconds

SIZES = {
    "olmoe-1b-7b": (2048, 1024, 8, 64),
    "mixtral-8x7b": (4096, 14336, 2, 8),
}  # hidden, neurons, ranks, experts
GPT_OSS_SIZES = (2880, 2880, 4, 32)
ALLOWED = {
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 2e-2,
}  # relative to the largest output
PROMPTS = (128, 512)
_CALLS = 100


class Kind(NamedTuple):
    """Gating of experts, as `runtime.kernels.gates.Gate` has it, and their layout: whether each
    matrix is [in, out], and whether there are biases."""

    rule: str = "silu"
    take_turns: bool = False
    alpha: float = 1.0
    limit: float | None = None
    is_transposed: bool = False
    has_bias: bool = False


USUAL = Kind()
GPT_OSS = Kind("scaled", True, 1.702, 7.0, True, True)


class Experts:
    """An arena of random experts, and their outputs by torch, one after another."""

    def __init__(
        self,
        sizes: tuple[int, int, int, int],
        *,
        dtype: torch.dtype,
        device: str,
        kind: Kind = USUAL,
    ) -> None:
        from runtime.kernels.gates import Gate
        from runtime.kernels.gpu.addressing import Strides
        from runtime.model.layout import ExpertLayout

        hidden, neurons, self.top_k, self.count = sizes
        self.kind = kind
        self.gate = Gate(kind.rule, take_turns=kind.take_turns, alpha=kind.alpha, limit=kind.limit)
        layout = ExpertLayout.of(_shapes(hidden, neurons, kind), dtype)
        self.strides = Strides.whole(
            layout, is_transposed=kind.is_transposed, are_paired=kind.take_turns
        )
        size = layout.nbytes // dtype.itemsize
        self.hidden = hidden
        self.dtype = dtype
        self.device = device
        self.random = torch.Generator(device).manual_seed(0)
        self.arena = self._normal(self.count * size, dtype).mul_(hidden**-0.5)
        self.starts = torch.arange(self.count, device=device) * size
        self.done = torch.zeros(hidden, dtype=torch.int32, device=device)
        self._views = [layout.views(expert.view(torch.uint8)) for expert in self.arena.split(size)]

    def step(self, num_tokens: int) -> "Tokens":
        """Tokens with random experts."""
        ids = (
            torch.rand(num_tokens, self.count, generator=self.random, device=self.device)
            .topk(self.top_k)
            .indices
        )
        weights = torch.rand(num_tokens, self.top_k, generator=self.random, device=self.device)
        return Tokens(
            self._normal(num_tokens * self.hidden, self.dtype).view(num_tokens, -1), ids, weights
        )

    def few(self, step: "Tokens") -> torch.Tensor:
        """Return the outputs of one token by the kernels that read the weights of each token anew;
        the last kernel also adds up."""
        from runtime.kernels.gpu.experts import gated
        from runtime.kernels.gpu.total import Total

        y = torch.empty(step.ids.numel(), self.hidden, device=self.device)
        out = torch.empty_like(step.x)
        total = Total(step.ids, step.weights, out, self.done, is_wide=False)
        gated.GatedKernels(self.strides, self.gate).multiply(
            step.x, step.ids, self.starts, self.arena, y, total=total
        )
        return out

    def few_apart(self, step: "Tokens") -> torch.Tensor:
        """Return the same outputs as `few`, added up by a kernel of its own."""
        from runtime.kernels.gpu.experts import gated, weighted_sum

        y = torch.empty(step.ids.numel(), self.hidden, device=self.device)
        out = torch.empty_like(step.x)
        gated.GatedKernels(self.strides, self.gate).multiply(
            step.x, step.ids, self.starts, self.arena, y
        )
        weighted_sum.combine(y, step.ids, step.weights, out)
        return out

    def many(self, step: "Tokens") -> torch.Tensor:
        """Return the outputs by the kernels that sort tokens by expert first."""
        return self.tiled(step, self.tiles(step))

    def tiles(self, step: "Tokens") -> "Tiles":
        """The step's pairs by expert, in tiles; copies ids to the host."""
        from runtime.kernels.gpu.experts import gated_tiles
        from runtime.kernels.gpu.tiles import SortedPairs

        ids = step.ids.cpu().numpy()
        groups = SortedPairs(ids)
        size = gated_tiles.tile_tokens(ids.size, self.count)
        tiles = groups.tiles({int(expert): int(expert) for expert in np.unique(ids)}, size)
        return Tiles(
            *(
                torch.from_numpy(one).to(self.device, non_blocking=True)
                for one in (groups.order, tiles)
            ),
            size,
        )

    def tiled(self, step: "Tokens", tiles: "Tiles") -> torch.Tensor:
        from runtime.kernels.gpu.experts import gated_tiles, weighted_sum

        shape = step.ids.numel(), self.hidden
        y = torch.empty(shape, dtype=self.dtype, device=self.device)
        out = torch.empty_like(step.x)
        own = {
            "top_k": self.top_k,
            "block_tokens": tiles.size,
            "strides": self.strides,
            "gate": self.gate,
        }
        gated_tiles.multiply(step.x, tiles.order, tiles.tiles, self.starts, self.arena, **own, y=y)
        weighted_sum.combine(y, step.ids, step.weights, out)
        return out

    def read_nbytes(self, step: "Tokens") -> int:
        """Bytes of the experts that a step needs, each once."""
        return len(step.ids.unique()) * self.arena.nbytes // self.count

    def one_by_one(self, step: "Tokens") -> torch.Tensor:
        """One expert after another, as transformers' own loop does it."""
        out = torch.zeros_like(step.x)
        for expert in step.ids.unique().tolist():
            tokens, ranks = (step.ids == expert).nonzero(as_tuple=True)
            inner = self._project(expert, "gate_up_proj", step.x[tokens])
            y = (
                self._project(expert, "down_proj", self.gate(inner))
                * step.weights[tokens, ranks, None]
            )
            out.index_add_(0, tokens, y.to(out.dtype))
        return out

    def _project(self, expert: int, name: str, x: torch.Tensor) -> torch.Tensor:
        weights = self._views[expert]
        y = F.linear(x, weights[name].mT if self.kind.is_transposed else weights[name])
        return y + weights[f"{name}_bias"] if self.kind.has_bias else y

    def _normal(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(count, generator=self.random, device=self.device, dtype=dtype)


def _shapes(hidden: int, neurons: int, kind: Kind) -> dict[str, tuple[int, ...]]:
    """The parameters of an expert by name."""
    shapes = {}
    for name, shape in {
        "gate_up_proj": (2 * neurons, hidden),
        "down_proj": (hidden, neurons),
    }.items():
        shapes[name] = shape[::-1] if kind.is_transposed else shape
        if kind.has_bias:
            shapes[f"{name}_bias"] = shape[:1]
    return shapes


class Tokens(NamedTuple):
    """x [T, H], ids [T, K] and weights [T, K]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Tiles(NamedTuple):
    """`order` and `tiles` as `runtime.kernels.gpu.tiles` has them, on the device; at most `size`
    pairs each."""

    order: torch.Tensor
    tiles: torch.Tensor
    size: int


def experts(
    device: str, sizes: tuple[int, int, int, int], *, kind: Kind = USUAL, calls: int = _CALLS
) -> Finding:
    """Passed if the kernels agree with torch on one token in every dtype, and `calls` times, to the
    bit, with a sum that is a kernel of its own; microseconds in bfloat16 with other experts each
    time."""
    return _compared(device, sizes, kind, Experts.few, Experts.few_apart, (1,), calls)


def prompts(
    device: str,
    sizes: tuple[int, int, int, int],
    *,
    kind: Kind = USUAL,
    num_tokens: tuple[int, ...] = PROMPTS,
    calls: int = 10,
) -> Finding:
    """The same for prompts, and equal bits in further calls."""
    return _compared(device, sizes, kind, Experts.many, Experts.many, num_tokens, calls)


def _compared(
    device: str,
    sizes: tuple[int, int, int, int],
    kind: Kind,
    way: Callable[[Experts, Tokens], torch.Tensor],
    other: Callable[[Experts, Tokens], torch.Tensor],
    num_tokens: tuple[int, ...],
    calls: int,
) -> Finding:
    shares = {}
    figures = {}
    is_same = True
    for dtype, allowed in ALLOWED.items():
        case = Experts(sizes, dtype=dtype, device=device, kind=kind)
        for count in num_tokens:
            step = case.step(count)
            ours = other(case, step)
            theirs = case.one_by_one(step).float()
            is_same &= all(torch.equal(ours, way(case, step)) for _ in range(calls))
            difference = ((ours.float() - theirs).abs().max() / theirs.abs().max()).item()
            shares[f"{str(dtype).removeprefix('torch.')}, {count} tokens"] = difference / allowed
    for count in num_tokens:
        figures[f"{count} tokens"] = _times(
            case, [case.step(count) for _ in range(4)], calls, device
        )
    told = ", ".join(
        (
            f"{name} {one['us']:.0f} us ({one['gbps']:.0f} GB/s), torch {one['torch_us']:.0f} us "
            "with launches and waits"
        )
        for name, one in figures.items()
    )
    detail = (
        f"{max(shares.values()):.2f} of what is allowed, {'equal' if is_same else 'OTHER'} bits "
        f"again; {told}"
    )
    return max(shares.values()) <= 1 and is_same, detail, {"of_allowed": shares, **figures}


def _times(case: Experts, steps: list["Tokens"], calls: int, device: str) -> dict[str, float]:
    """Microseconds of our kernels by the device's clock, with GB/s of the experts read, and of
    torch by the host's."""
    if len(steps[0].x) == 1:
        us = microseconds(lambda turn: case.few(steps[turn]), len(steps), calls, device)
    else:
        tiles = [case.tiles(step) for step in steps]
        us = microseconds(
            lambda turn: case.tiled(steps[turn], tiles[turn]), len(steps), calls, device
        )
    torch_us = host_microseconds(
        lambda turn: case.one_by_one(steps[turn]), len(steps), calls, device
    )
    nbytes = sum(map(case.read_nbytes, steps)) / len(steps)
    return {"us": us, "torch_us": torch_us, "gbps": gbps(nbytes, us)}
