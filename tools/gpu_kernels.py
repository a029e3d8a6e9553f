"""What tools.gpu_check checks of the kernels for a token's experts and for buddies: the same answer, and how soon."""

import time
from collections.abc import Callable
from itertools import cycle, islice

import numpy as np
import torch
from torch.nn import functional as F

from tools.gpu_checks import Finding, finish

SIZES = {"olmoe-1b-7b": (2048, 1024, 8), "mixtral-8x7b": (4096, 14336, 2)}  # hidden, neurons, ranks
ALLOWED = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}  # of the largest output
BUDDY_TOKENS = (1, 8, 64, 512)
_CALLS = 100


class Experts:
    """An arena of random experts that takes turns among tokens' choices, and what torch makes of the same."""

    def __init__(self, hidden: int, neurons: int, top_k: int, *, turns: int, dtype: torch.dtype, device: str) -> None:
        self.hidden, self.neurons, self.top_k = hidden, neurons, top_k
        random = torch.Generator(device).manual_seed(0)
        size, count = 3 * hidden * neurons, top_k * turns
        self.arena = torch.randn(count * size, generator=random, device=device, dtype=dtype) * hidden**-0.5
        self.starts = torch.arange(count, device=device) * size
        self.ids = [torch.arange(turn * top_k, (turn + 1) * top_k, device=device)[None] for turn in range(turns)]
        self.weights = torch.rand(1, top_k, generator=random, device=device)
        self.x = torch.randn(1, hidden, generator=random, device=device).to(dtype)
        self._y = torch.empty(top_k, hidden, device=device)
        self._inner = torch.empty(top_k, neurons, dtype=dtype, device=device)
        self._views = [self._cut(expert) for expert in self.arena.split(size)]

    def kernels(self, turn: int) -> torch.Tensor:
        from runtime import fused_triton

        offsets, ids, out = (0, 2 * self.hidden * self.neurons), self.ids[turn], torch.empty_like(self.x)
        fused_triton.multiply(self.x, ids, self.starts, self.arena, offsets=offsets, inner=self._inner, y=self._y)
        fused_triton.combine(self._y, ids, self.weights, out)
        return out

    def one_by_one(self, turn: int) -> torch.Tensor:
        """One expert after another, the weights known to the host."""
        out = torch.zeros_like(self.x)
        for rank in range(self.top_k):
            gate_up, down = self._views[turn * self.top_k + rank]
            gate, up = F.linear(self.x, gate_up).chunk(2, dim=-1)
            out += (F.linear(F.silu(gate) * up, down) * self.weights[:, rank : rank + 1]).to(out.dtype)
        return out

    def _cut(self, expert: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up, down = expert.split([2 * self.hidden * self.neurons, self.hidden * self.neurons])
        return gate_up.view(2 * self.neurons, self.hidden), down.view(self.hidden, self.neurons)


def experts(device: str, sizes: tuple[int, int, int], *, turns: int = 4, calls: int = _CALLS) -> Finding:
    """Passed if the kernels give what torch gives in every dtype; microseconds of one token in bfloat16, cold."""
    differences = {}
    for dtype, allowed in ALLOWED.items():
        case = Experts(*sizes, turns=turns, dtype=dtype, device=device)
        ours, theirs = case.kernels(0).float(), case.one_by_one(0).float()
        differences[dtype] = ((ours - theirs).abs().max() / theirs.abs().max()).item() / allowed
    nbytes = 3 * sizes[0] * sizes[1] * sizes[2] * 2
    ours_us, theirs_us = (_us(way, turns, calls, device) for way in (case.kernels, case.one_by_one))
    detail = f"{max(differences.values()):.2f} of what is allowed; a token {ours_us:.0f} us, torch {theirs_us:.0f} us"
    named = {str(dtype).removeprefix("torch."): share for dtype, share in differences.items()}
    figures = {"of_allowed": named, "us": ours_us, "torch_us": theirs_us, "gbps": nbytes / ours_us / 1e3}
    return max(differences.values()) <= 1, detail, figures


def buddies(device: str, *, num_tokens: tuple[int, ...] = BUDDY_TOKENS, calls: int = _CALLS) -> Finding:
    """Passed if the kernel says what the policy says; microseconds of 8 ranks of 64 experts with 16 buddies."""
    from runtime.buddy_triton import substitute
    from runtime.policies.miss import buddy

    random, figures, is_same = np.random.default_rng(0), {}, True
    lists = np.stack([random.permutation(np.delete(np.arange(64), expert))[:16] for expert in range(64)])
    resident = random.random(64) < 0.25
    there = [torch.from_numpy(array).to(device) for array in (resident, lists)]
    for count in num_tokens:
        selected = np.stack([random.permutation(64)[:8] for _ in range(count)])
        own = torch.from_numpy(selected).to(device)
        said = substitute(own, *there, 16).cpu().numpy()
        is_same &= np.array_equal(said, buddy.substitute(selected, resident, lists, 16))
        figures[f"{count} tokens"] = _us(lambda turn, own=own: substitute(own, *there, 16), 1, calls, device)
    told = ", ".join(f"{name} {us:.0f} us" for name, us in figures.items())
    return is_same, f"{'the same' if is_same else 'DIFFERENT'} as the policy; {told}", figures


def _us(work: Callable[[int], object], turns: int, calls: int, device: str) -> float:
    """Of one call, launches and all, the next experts each time."""
    work(0)
    finish(device)
    begin_s = time.perf_counter()
    for turn in islice(cycle(range(turns)), calls):
        work(turn)
    finish(device)
    return (time.perf_counter() - begin_s) / calls * 1e6
