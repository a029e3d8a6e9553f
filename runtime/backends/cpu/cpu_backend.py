"""One token's experts, or those of a few tokens, on a CPU in compiled code: weights are read once,
where they lie, and one call takes all experts. A token gets the bits that it would get alone.

The result equals the one of the model's own code up to the order of additions within a product:
some 1e-7 in float32. In bfloat16, rounded wherever the module rounds, hardly ever does a bit
differ. docs/lab/performance.md has figures.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from runtime.backends.backend import Backend, StepTokens
from runtime.backends.cpu.form import TokenOperands
from runtime.backends.cpu.forms_cpu import TokenKernels, form_of, has_form
from runtime.backends.cpu.forms_published import has_kernels
from runtime.backends.torch_backend import TorchBackend
from runtime.control.plan import Place
from runtime.devices import is_host
from runtime.kernels.cpu.decoder.compiled_layers import WholeExperts
from runtime.kernels.cpu.decoder.compiled_norm import like_of
from runtime.kernels.cpu.dense import MOST_TOKENS
from runtime.kernels.cpu.threads import KernelThreads
from runtime.kernels.load import AS_NUMPY, kernels
from runtime.model.open import MoeModel
from runtime.tiers.fast import ResidentExperts
from runtime.tiers.near import NearTier


class CpuBackend(Backend):
    """Computes the experts of up to `MOST_TOKENS` tokens in compiled code on `threads`, near ones
    as well. More tokens are computed by torch, and by compiled code where few of them have the same
    expert.

    `whole` has the kernel of each layer that is noted.
    """

    name: ClassVar[str] = "fused"
    takes_splits: ClassVar[bool] = True

    def __init__(self, opened: MoeModel, resident: ResidentExperts, threads: KernelThreads) -> None:
        self._kernels = TokenKernels(opened, resident, threads)
        self._of_several = TorchBackend(
            resident, None, self._kernels, sum_dtype=opened.sum_dtype, is_fused=True
        )
        self._num_experts = opened.shape.num_experts
        self._shape = opened.shape
        self._as_numpy = AS_NUMPY[opened.dtype]
        self._like = like_of(opened.dtype)
        self._top_k = opened.shape.top_k
        self.whole: dict[int, Callable[[int, int, int, int, bool, int], bool]] = {}
        num_rows = MOST_TOKENS * opened.shape.top_k
        self._y = np.zeros((num_rows, opened.layers[0].hidden_size), np.float32)

    @staticmethod
    def suits(opened: MoeModel, *, has_replicas: bool = False) -> bool:
        """Return whether kernels exist for the model's experts: of a gate in
        `runtime.kernels.gates`, each matrix by rows; where replicas are computed beside them, of
        SiLU's."""
        has_kernels = has_form(
            opened.layers[0].experts, opened.store.layout, has_replicas=has_replicas
        )
        return has_kernels and opened.dtype in AS_NUMPY and is_host(opened.model.device)

    @staticmethod
    def dequantised_layers(opened: MoeModel) -> tuple[int, ...]:
        layout = opened.store.layout
        if layout.codes != "mixed":
            return ()
        kernelled = list(map(has_kernels, layout.variants))
        return tuple(at for at, variant in enumerate(opened.variants) if not kernelled[variant])

    @staticmethod
    def timed_experts(opened: MoeModel, contents: Sequence[torch.Tensor]) -> Callable[[], None]:
        first = opened.layers[0]
        form = form_of(opened.store.layout, opened.dtype, first.experts, opened.activations)
        hidden = first.hidden_size
        like = like_of(opened.dtype)
        x = np.zeros(hidden, np.float32)
        y = np.zeros((len(contents), hidden), np.float32)
        operands = TokenOperands(x, np.arange(len(contents)), y, like)
        starts = [content.data_ptr() for content in contents]
        return lambda: form.multiply((), starts, operands)

    def begin(self, tokens: StepTokens) -> Backend:
        num_tokens = tokens.hidden.shape[0]
        if num_tokens > MOST_TOKENS or tokens.rows is not None:
            return self._of_several.begin(tokens)
        weights: list[list[float]] = []
        owners: list[int] = []  # of rows
        rows: dict[int, list[int]] = {}
        for token in range(num_tokens):
            applied = _applied(tokens.experts[token].tolist(), tokens.host_weights[token])
            for expert in applied:
                rows.setdefault(expert, []).append(len(owners))
                owners.append(token)
            weights.append(list(applied.values()))
        self._rows = rows
        self._start(tokens.hidden, weights, owners if num_tokens > 1 else None)
        return self

    def add(self, places: Sequence[Place], starts: list[int] | None = None) -> None:
        # an expert once for each of its rows
        operands = [
            (place, start, row)
            for place, start in zip(places, starts or self._kernels.starts(places), strict=True)
            for row in self._rows[place.key % self._num_experts]
        ]
        if operands:
            self._kernels.add(*zip(*operands, strict=True), self._y)

    def add_near(self, places: Sequence[Place], near: NearTier, ready: Sequence[Place]) -> None:
        if contents := near.contents_in_ram(places):
            starts = [content.data_ptr() for content in contents]
            self.add([*ready, *places], self._kernels.starts(ready) + starts)
            return
        self.add(ready)
        for place in places:
            self.add([place], [near.content(place).data_ptr()])

    def finish(self) -> torch.Tensor:
        out = torch.empty_like(self._hidden)
        first = 0
        for own, weights in zip(out.view(self._as_numpy).numpy(), self._weights, strict=True):
            self._combine(self._y[first:], np.array(weights, np.float32), len(weights), own)
            first += len(weights)
        return out

    @cached_property
    def _combine(self) -> Callable[[np.ndarray, np.ndarray, int, np.ndarray], None]:
        """The kernel that adds the rows of `y` [K, H], each times its weight, to a token [H]."""
        return kernels("cpu.gated").combine.of(self._like)

    def forward(
        self,
        module: nn.Module,
        hidden: torch.Tensor,
        experts: Sequence[int],
        places: Sequence[Place],
        weights: torch.Tensor,
    ) -> torch.Tensor:
        order = sorted(range(len(experts)), key=experts.__getitem__)
        self._start(hidden, [weights.float().numpy()[0, order]])
        ordered = [places[rank] for rank in order]
        self._kernels.add(ordered, self._kernels.starts(ordered), range(len(ordered)), self._y)
        return self.finish()

    @property
    def computes_layers(self) -> bool:
        """True if one kernel computes a whole layer."""
        return self._kernels.computes_layers(self._top_k)

    def note_layer(self, layer: int, slots: Sequence[int]) -> None:
        starts = self.all_whole.starts[layer]
        starts[:] = self._kernels.starts_of(slots)
        self.whole[layer] = self._kernels.whole_layer(
            starts, self.all_whole.layer(layer), self._top_k
        )

    @cached_property
    def all_whole(self) -> WholeExperts:
        """Addresses, matrices and replicas of the experts in the layers that are noted."""
        form = self._kernels.whole_form
        shape = self._shape
        starts = np.zeros((shape.num_layers, shape.num_experts), np.int64)
        matrices = np.array(form.matrices)
        replicas = self._kernels.whole_replicas(shape.num_layers, shape.num_experts)
        return WholeExperts(
            starts, np.tile(matrices, (shape.num_layers, 1, 1)), form.num_neurons, replicas
        )

    def forward_whole(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor | None:
        hidden = hidden.contiguous()
        ids = ids.contiguous()
        weights = weights.contiguous()
        out = torch.empty_like(hidden)
        are_wide = weights.dtype is torch.float32
        if weights.dtype not in (hidden.dtype, torch.float32):
            weights = weights.float()
            are_wide = True
        places = ids.data_ptr(), weights.data_ptr()
        operands = len(hidden), hidden.data_ptr(), *places, are_wide, out.data_ptr()
        return out if self.whole[layer](*operands) else None

    def clear(self) -> None:
        self.whole.clear()
        self._of_several.clear()

    def _start(
        self,
        hidden: torch.Tensor,
        weights: Sequence[Sequence[float]],
        owners: list[int] | None = None,
    ) -> None:
        """Take tokens; the weights of each are by ascending expert, the order in which the module
        adds experts up. `owners` are the tokens of rows."""
        self._hidden = hidden
        self._weights = weights
        self._kernels.take(hidden, owners)
        self._y[: sum(map(len, weights))] = 0


def _applied(experts: Sequence[int], weights: np.ndarray) -> dict[int, float]:
    """Return the weights of a token's experts, ascending. A router may select one twice."""
    applied: dict[int, float] = {}
    for expert, weight in zip(experts, weights, strict=True):
        applied[expert] = applied.get(expert, 0) + weight
    applied.pop(-1, None)
    return dict(sorted(applied.items()))
