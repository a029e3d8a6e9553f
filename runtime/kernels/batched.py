"""A token's experts as one batch, on a CPU: one gate for all, and one product where that gives the
same bits.

A small expert costs more in calls than in arithmetic, and torch's matrix-vector kernels read memory
at half the speed of a plain copy. A batch avoids both costs: the experts of a token are copied side
by side into a buffer that stays in the processor's cache, and multiplied by one batched product.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from runtime.devices import is_host
from runtime.model.arithmetic import expert_forward, project
from runtime.model.huge_pages import anonymous
from runtime.model.layout import ExpertLayout
from runtime.model.open import MoeModel

IN_CACHE = 8 << 20  # bytes: a larger buffer leaves the processor's cache before it is read again
_DRAWS = 8

Views = dict[str, torch.Tensor]


class ExpertBatch(NamedTuple):
    """The n experts of one batch: views of each expert's parts, and, if the experts lie side by
    side, each part of all of them [n, *shape]."""

    alone: Sequence[Views]
    beside: Views | None


class SequentialExperts:
    """Low-bit experts computed one after another, behind the interface of `BatchedExperts`."""

    def __init__(self, project: Callable[..., torch.Tensor]) -> None:
        self._project = project

    def forward(
        self,
        module: nn.Module,
        experts: Sequence[Views],
        x: torch.Tensor,
        *,
        beside: Views | None = None,
    ) -> torch.Tensor:
        """Compute n experts on one token: x [1, H] -> [n, 1, H]. `beside` is ignored."""
        return torch.stack(
            [expert_forward(module, views, x, project=self._project) for views in experts]
        )


class BatchedExperts:
    """Up to `num_experts` experts on one token; the projections named in `batched` are one product
    each."""

    def __init__(
        self, module: nn.Module, layout: ExpertLayout, num_experts: int, *, batched: Collection[str]
    ) -> None:
        self._batched = {
            name: [part for part in layout.parts if part.name.startswith(name)] for name in batched
        }
        parts = [part for named in self._batched.values() for part in named]
        buffers = {
            part.name: layout.several(part, anonymous(num_experts * part.nbytes)) for part in parts
        }
        # The buffers for n experts. Their pages take no memory until an expert is copied to them.
        self._into = [
            {name: buffer[:n] for name, buffer in buffers.items()} for n in range(num_experts + 1)
        ]

    def forward(
        self,
        module: nn.Module,
        experts: Sequence[Views],
        x: torch.Tensor,
        *,
        beside: Views | None = None,
    ) -> torch.Tensor:
        """Compute n experts, given as views of their slots, on one token: x [1, H] -> [n, 1, H].
        Nothing is copied if `beside` gives each part of all of them as [n, *shape]."""
        return expert_forward(
            module,
            ExpertBatch(experts, beside),
            x.expand(len(experts), 1, -1),
            project=self.project,
        )

    def project(
        self, module: nn.Module, experts: ExpertBatch, name: str, x: torch.Tensor
    ) -> torch.Tensor:
        """Compute one projection of each expert: x [n, 1, in] -> [n, 1, out]."""
        if name not in self._batched:
            return one_by_one(module, experts.alone, name, x)
        parts = experts.beside
        if parts is None:  # copy them side by side
            parts = self._into[len(experts.alone)]
            for part in self._batched[name]:
                own = tuple(map(itemgetter(part.name), experts.alone))
                torch.stack(own, out=parts[part.name])
        matrices = parts[name]
        y = torch.bmm(x, matrices if module.is_transposed else matrices.mT)
        return y + parts[f"{name}_bias"][:, None] if module.has_bias else y


def one_by_one(
    module: nn.Module, experts: Sequence[Views], name: str, x: torch.Tensor
) -> torch.Tensor:
    """Compute `BatchedExperts.project` with one product for each expert."""
    return torch.stack(
        [project(module, views, name, row) for views, row in zip(experts, x.unbind(), strict=True)]
    )


@torch.no_grad()
def choose_batched(opened: MoeModel) -> BatchedExperts | SequentialExperts | None:
    """Return an object that computes a token's experts with the bits of one expert after another on
    this machine.

    None if no batch gives the same bits, on a GPU, and for experts that are too large to gain by
    it.
    """
    if not opened.store.layout.is_plain:
        return SequentialExperts(opened.store.layout.project)
    if not is_worth_batching(opened) or not gates_by_row(opened.layers[0].experts):
        return None
    trial = _Trial(opened)
    batched = trial.exact_projections()
    candidate = partial(
        BatchedExperts, trial.module, trial.layout, trial.num_experts, batched=batched
    )
    return candidate() if trial.is_exact(candidate()) else None


def is_worth_batching(opened: MoeModel) -> bool:
    """Return whether the model is on a CPU and a token's experts fit into its cache."""
    return (
        is_host(opened.model.device) and opened.shape.top_k * opened.store.layout.nbytes <= IN_CACHE
    )


class _Trial:
    """Comparison of `BatchedExperts` with one expert after another, on random weights.

    The order in which a kernel adds depends on shapes, not on values. Weights whose products cancel
    except for rounding make the order visible, which rounding to bfloat16 would mostly hide. They
    cancel in pairs, so sizes must be even.
    """

    def __init__(self, opened: MoeModel) -> None:
        self.module = opened.layers[0].experts
        self.layout = opened.store.layout
        self.num_experts = opened.shape.top_k
        self._hidden_size = opened.layers[0].hidden_size
        self._random = torch.Generator().manual_seed(0)
        self._experts = [
            self.layout.views(anonymous(self.layout.nbytes)) for _ in range(self.num_experts)
        ]

    def exact_projections(self) -> list[str]:
        """Return the projections for which one batched product gives the bits of separate
        products."""
        names = [
            part.name
            for part in self.layout.parts
            if len(part.shape) == 2 and not any(n % 2 for n in part.shape)
        ]
        batched = BatchedExperts(self.module, self.layout, self.num_experts, batched=names)
        return [name for name in names if self._adds_alike(batched, name)]

    def is_exact(self, batched: BatchedExperts) -> bool:
        """Return whether whole experts give the same bits on normally distributed weights."""
        for views in self._experts:
            for values in views.values():
                values.normal_(generator=self._random)
        for _ in range(_DRAWS):
            x = torch.randn(1, self._hidden_size, generator=self._random).to(self.layout.dtype)
            alone = [expert_forward(self.module, views, x) for views in self._experts]
            pairs = zip(batched.forward(self.module, self._experts, x), alone, strict=True)
            if not all(torch.equal(ours, theirs) for ours, theirs in pairs):
                return False
        return True

    def _adds_alike(self, batched: BatchedExperts, name: str) -> bool:
        x = self._fill_cancelling(name)
        return all(
            torch.equal(
                batched.project(self.module, batch, name, rows),
                one_by_one(self.module, batch.alone, name, rows),
            )
            for batch in (
                ExpertBatch(self._experts[:n], None) for n in range(1, self.num_experts + 1)
            )
            for rows in (x.expand(len(batch.alone), 1, -1), x.repeat(len(batch.alone), 1, 1))
        )

    def _fill_cancelling(self, name: str) -> torch.Tensor:
        """Give every expert weights that cancel on the returned token [1, in]."""
        matrices = [
            views[name] if self.module.is_transposed else views[name].mT for views in self._experts
        ]
        size = matrices[0].shape[0]
        order = torch.randperm(size, generator=self._random)
        for matrix in matrices:
            half = torch.randn(size // 2, matrix.shape[1], generator=self._random)
            matrix.copy_(torch.cat((half, -half))[order])
        for views in self._experts:
            if self.module.has_bias:
                views[f"{name}_bias"].zero_()
        return (
            torch.randn(1, size // 2, generator=self._random)
            .repeat(1, 2)[:, order]
            .to(self.layout.dtype)
        )


def is_plain(module: nn.Module) -> bool:
    """Return whether compiled kernels suit these experts: gated row by row, without bias, each
    matrix [out, in], gate above up."""
    return (
        gates_by_row(module)
        and module.is_concatenated
        and not (module.is_transposed or module.has_bias)
    )


def gates_by_row(module: nn.Module) -> bool:
    """Return whether one call can gate several experts with the bits of one call for each.

    A vectorised kernel rounds values of its full vectors in another way than the remainder of a
    row. SiLU of one half of each row works row by row, because half rows are not contiguous; later
    kernels of other gates can join rows.
    """
    is_plain = module.has_gate and type(module)._apply_gate is _default_apply_gate
    has_norm = getattr(module, "has_post_expert_norm", False)
    gate = getattr(module, "act_fn", None)
    is_silu = gate is nn.functional.silu or isinstance(gate, SiLUActivation | nn.SiLU)
    return is_plain and not has_norm and is_silu
