"""One token's experts at once: copied side by side and multiplied as a batch, where that gives the same bits.

On a CPU a small expert costs more in calls than in arithmetic, and the matrix-vector kernels of torch read memory at
half the speed of a plain copy. Both are saved by copying a token's experts into one buffer that stays in the cache.
"""

import torch
from torch import nn

from runtime.experts import expert_forward
from runtime.model import MoeModel
from runtime.weights import ExpertLayout, aligned

_LIMIT = 8 << 20  # bytes of a token's experts: what is larger leaves the cache before it is used, and is not worth it


class Gathered:
    """Buffers for up to `num_experts` experts of `layout`, and the computation on them."""

    def __init__(self, layout: ExpertLayout, num_experts: int) -> None:
        self._layout, self._num_experts = layout, num_experts
        buffers = {part.name: torch.empty(num_experts, *part.shape, dtype=layout.dtype) for part in layout.parts}
        self._into = [{name: buffer[:n] for name, buffer in buffers.items()} for n in range(num_experts + 1)]
        self._weights = [{name: _as_matrices(buffer) for name, buffer in into.items()} for into in self._into]

    def forward(
        self, module: nn.Module, experts: list[dict[str, torch.Tensor]], x: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Experts, as views of their slots, on one token: x [1, H] -> [1, H] of each."""
        n = len(experts)
        for name, buffer in self._into[n].items():
            torch.stack([views[name] for views in experts], out=buffer)
        return expert_forward(module, self._weights[n], x.expand(n, 1, -1)).unbind()

    def is_exact(self, module: nn.Module, hidden_size: int) -> bool:
        """Whether this gives what one expert after another gives, bit by bit, for every number of experts.

        The order in which a kernel adds depends on shapes and not on values, so random ones tell.
        """
        random = torch.Generator().manual_seed(0)
        experts = [self._layout.views(aligned(self._layout.nbytes)) for _ in range(self._num_experts)]
        for views in experts:
            for values in views.values():
                values.normal_(generator=random)
        x = torch.randn(1, hidden_size, generator=random).to(self._layout.dtype)
        alone = [expert_forward(module, views, x) for views in experts]
        return all(
            torch.equal(together, each)
            for n in range(1, self._num_experts + 1)
            for together, each in zip(self.forward(module, experts[:n], x), alone[:n], strict=True)
        )


@torch.no_grad()
def gathered_for(opened: MoeModel) -> Gathered | None:
    """None on a GPU, for experts too large to be copied, and where the bits would not be the same."""
    layout, first, shape = opened.store.layout, opened.layers[0], opened.shape
    if opened.model.device.type != "cpu" or shape.top_k * layout.nbytes > _LIMIT:
        return None
    gathered = Gathered(layout, shape.top_k)
    return gathered if gathered.is_exact(first.experts, opened.config.hidden_size) else None


def _as_matrices(buffer: torch.Tensor) -> torch.Tensor:
    """[n, a, b] as it is, a bias [n, a] as [n, 1, a]."""
    return buffer if buffer.dim() == 3 else buffer[:, None]
