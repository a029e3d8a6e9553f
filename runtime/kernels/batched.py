"""A token's experts together, on a CPU: one gate for all, and one product where that gives the same bits.

A small expert costs more in calls than in arithmetic, and the matrix-vector kernels of torch read memory at half the
speed of a plain copy. Both are saved by copying the experts of a token side by side, into a buffer that stays in the
cache, and multiplying them as a batch.
"""

import mmap
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from artifacts.shape import FULL_BITS
from runtime.model.arithmetic import expert_forward, project
from runtime.model.layout import ExpertLayout
from runtime.model.open import MoeModel

IN_CACHE = 8 << 20  # bytes: what is larger leaves the cache before it is used again
_DRAWS = 8

Views = dict[str, torch.Tensor]


class Several(NamedTuple):
    """n experts by themselves and, where they lie side by side, each part of all of them [n, *shape]."""

    alone: Sequence[Views]
    beside: Views | None


class OneByOne:
    """In the place of `Together`: one expert after another, packed, as `project` multiplies them."""

    def __init__(self, project: Callable[..., torch.Tensor]) -> None:
        self._project = project

    def forward(
        self, module: nn.Module, experts: Sequence[Views], x: torch.Tensor, *, beside: Views | None = None
    ) -> torch.Tensor:
        """n experts on one token: x [1, H] -> [n, 1, H]."""
        return torch.stack([expert_forward(module, views, x, project=self._project) for views in experts])


class Together:
    """Computes up to `num_experts` experts on one token; `batched` names the projections that are one product."""

    def __init__(self, module: nn.Module, layout: ExpertLayout, num_experts: int, *, batched: Collection[str]) -> None:
        self._batched = {name: [part for part in layout.parts if part.name.startswith(name)] for name in batched}
        parts = [part for own in self._batched.values() for part in own]
        buffers = {part.name: layout.several(part, _memory(num_experts * part.nbytes)) for part in parts}
        # Where so many experts are copied to; it takes no memory as long as none ever are.
        self._into = [{name: buffer[:n] for name, buffer in buffers.items()} for n in range(num_experts + 1)]

    def forward(
        self, module: nn.Module, experts: Sequence[Views], x: torch.Tensor, *, beside: Views | None = None
    ) -> torch.Tensor:
        """n experts, as views of their slots, on one token: x [1, H] -> [n, 1, H]. Nothing is copied of what is given
        `beside`: each part of all of them, [n, *shape]."""
        return expert_forward(module, Several(experts, beside), x.expand(len(experts), 1, -1), project=self.project)

    def project(self, module: nn.Module, experts: Several, name: str, x: torch.Tensor) -> torch.Tensor:
        """One projection of each: x [n, 1, in] -> [n, 1, out]."""
        if name not in self._batched:
            return one_by_one(module, experts.alone, name, x)
        parts = self._copied(name, experts.alone) if experts.beside is None else experts.beside
        y = torch.bmm(x, _as_operand(module, parts[name]))
        return y + _as_operand(module, parts[f"{name}_bias"]) if module.has_bias else y

    def _copied(self, name: str, experts: Sequence[Views]) -> Views:
        """What a projection takes, side by side."""
        into = self._into[len(experts)]
        for part in self._batched[name]:
            torch.stack([views[part.name] for views in experts], out=into[part.name])
        return into


def one_by_one(module: nn.Module, experts: Sequence[Views], name: str, x: torch.Tensor) -> torch.Tensor:
    """As `Together.project`, a product for each."""
    return torch.stack([project(module, views, name, own) for views, own in zip(experts, x.unbind(), strict=True)])


@torch.no_grad()
def together_for(opened: MoeModel) -> Together | OneByOne | None:
    """What gives the same bits as one expert after another on this machine.

    None if nothing does, on a GPU, and for experts that are too large to gain by it.
    """
    if opened.base != FULL_BITS:
        return OneByOne(opened.store.layout.project)
    if not pays_together(opened) or not gates_by_row(opened.layers[0].experts):
        return None
    trial = _Trial(opened)
    found = partial(Together, trial.module, trial.layout, trial.num_experts, batched=trial.exact_projections())
    return found() if trial.is_exact(found()) else None


def pays_together(opened: MoeModel) -> bool:
    """Whether a token's experts are small enough, and on a CPU."""
    return opened.model.device.type == "cpu" and opened.shape.top_k * opened.store.layout.nbytes <= IN_CACHE


class _Trial:
    """Compares `Together` with one expert after another, on made-up weights.

    How a kernel adds depends on shapes, not on values. Weights for which every product cancels but for rounding show
    the order of additions, which rounding to bfloat16 would mostly hide; they come in pairs, so sizes must be even.
    """

    def __init__(self, opened: MoeModel) -> None:
        self.module, self.layout = opened.layers[0].experts, opened.store.layout
        self.num_experts, self._hidden_size = opened.shape.top_k, opened.config.hidden_size
        self._random = torch.Generator().manual_seed(0)
        self._experts = [self.layout.views(_memory(self.layout.nbytes)) for _ in range(self.num_experts)]

    def exact_projections(self) -> list[str]:
        names = [part.name for part in self.layout.parts if len(part.shape) == 2 and not any(n % 2 for n in part.shape)]
        every = Together(self.module, self.layout, self.num_experts, batched=names)
        return [name for name in names if self._adds_alike(every, name)]

    def is_exact(self, together: Together) -> bool:
        """The whole of it, on ordinary weights."""
        for views in self._experts:
            for values in views.values():
                values.normal_(generator=self._random)
        for _ in range(_DRAWS):
            x = torch.randn(1, self._hidden_size, generator=self._random).to(self.layout.dtype)
            alone = [expert_forward(self.module, views, x) for views in self._experts]
            both = zip(together.forward(self.module, self._experts, x), alone, strict=True)
            if not all(torch.equal(one, other) for one, other in both):
                return False
        return True

    def _adds_alike(self, every: Together, name: str) -> bool:
        x = self._fill_cancelling(name)
        return all(
            torch.equal(every.project(self.module, some, name, own), one_by_one(self.module, some.alone, name, own))
            for some in (Several(self._experts[:n], None) for n in range(1, self.num_experts + 1))
            for own in (x.expand(len(some.alone), 1, -1), x.repeat(len(some.alone), 1, 1))
        )

    def _fill_cancelling(self, name: str) -> torch.Tensor:
        """Gives every expert weights that cancel on the returned token [1, in]."""
        matrices = [views[name] if self.module.is_transposed else views[name].mT for views in self._experts]
        size = matrices[0].shape[0]
        order = torch.randperm(size, generator=self._random)
        for matrix in matrices:
            half = torch.randn(size // 2, matrix.shape[1], generator=self._random)
            matrix.copy_(torch.cat((half, -half))[order])
        for views in self._experts:
            if self.module.has_bias:
                views[f"{name}_bias"].zero_()
        return torch.randn(1, size // 2, generator=self._random).repeat(1, 2)[:, order].to(self.layout.dtype)


def is_plain(module: nn.Module) -> bool:
    """Whether experts are gated row by row, without bias, each matrix [out, in] with gate above up: compiled code is of
    this kind."""
    return gates_by_row(module) and module.is_concatenated and not (module.is_transposed or module.has_bias)


def gates_by_row(module: nn.Module) -> bool:
    """Whether experts can share a gate: each must see its values as it would alone.

    A kernel rounds those that fill its vectors otherwise than the rest of a row. SiLU of one half of each row works
    row by row, as halves of rows cannot be joined; what comes after the first kernel of another gate can be.
    """
    is_plain = module.has_gate and type(module)._apply_gate is _default_apply_gate
    has_norm = getattr(module, "has_post_expert_norm", False)
    return is_plain and not has_norm and isinstance(module.act_fn, SiLUActivation | nn.SiLU)


def _memory(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] on a border of pages. Dropped, it is the system's again: a heap would keep what a trial took."""
    return torch.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def _as_operand(module: nn.Module, buffer: torch.Tensor) -> torch.Tensor:
    """Matrices as [n, in, out], biases [n, out] as [n, 1, out]."""
    if buffer.dim() == 2:
        return buffer[:, None]
    return buffer if module.is_transposed else buffer.mT
