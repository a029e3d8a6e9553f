"""A step's experts on a GPU in a few kernels, which find each expert in the arena of slots.

The result equals the one of the model's own code up to the order of additions within a product, as
in `runtime.backends.cpu.cpu_backend`.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from runtime.backends.backend import Backend, StepTokens
from runtime.backends.triton.forms_gpu import (
    GpuForm,
    GpuForms,
    GpuFullPrecision,
    full_form,
    has_form,
)
from runtime.backends.triton.forms_published_gpu import GpuPublished
from runtime.backends.triton.near_experts import NearExperts
from runtime.control.plan import Place
from runtime.kernels.cpu.threads import KernelThreads
from runtime.kernels.gates import gate_of
from runtime.kernels.gpu.addressing import RankNumbers
from runtime.kernels.gpu.tiles import SortedPairs
from runtime.kernels.gpu.total import MOST_TOKENS, Total
from runtime.kernels.load import compiler, kernels
from runtime.model.arithmetic import Assigned, assign, expert_forward, gather
from runtime.model.open import MoeModel
from runtime.tiers.fast import ResidentExperts
from runtime.tiers.near import NearTier

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NONE = -1
# tokens; for more, an expert as published is dequantised once. A guess; tools.gpu.check times both
_FEW = 8


class TokenSlots(NamedTuple):
    """Where the experts of a few tokens are, by rank, [T, K] on the device: slots of those that are
    `ready` and of those that are `coming`, int32, -1 for none; their `keys`, int32, -1 for no
    expert, and `weights`."""

    ready: torch.Tensor
    coming: torch.Tensor
    keys: torch.Tensor
    weights: torch.Tensor


class TritonBackend(Backend):
    """Computes experts in Triton kernels, in one arena of slots.

    Many tokens are sorted by expert, and a tile of them reads an expert's weights once. A single
    token reads the weights by itself; for experts as published, so does each of a few tokens. On
    many tokens, torch computes replicas of few bits, and experts as published, which a kernel
    dequantises. The host computes near experts meanwhile. The last kernel of a token's experts adds
    them up, if all experts that it computes lie as the checkpoint has them.

    `whole` has the offset of each expert [E] of a layer that is noted. `near` computes experts on
    the host.
    """

    name: ClassVar[str] = "fused, triton"
    computes_layers = True
    needs_all: ClassVar[bool] = True  # the host does not learn which experts a token uses
    needs_no_host: ClassVar[bool] = True
    is_for_one_device: ClassVar[bool] = True

    def __init__(self, opened: MoeModel, resident: ResidentExperts, threads: KernelThreads) -> None:
        self._resident = resident
        self._num_experts = opened.shape.num_experts
        self._forms = GpuForms(resident, opened.layers[0].experts)
        self._device = resident.slots.device
        self._is_wide = opened.sum_dtype is torch.float32  # how the model adds experts up
        self.near = NearExperts(opened, resident, threads)
        self._hidden_size = opened.layers[0].hidden_size
        self._done = torch.zeros(
            MOST_TOKENS * self._hidden_size, dtype=torch.int32, device=self._device
        )
        self._output: torch.Tensor | None = None  # of a token, once its last kernel adds it up
        self._kept: dict[int, torch.Tensor] = {}
        self.whole: dict[int, torch.Tensor] = {}

    @staticmethod
    def suits(opened: MoeModel, *, has_replicas: bool = False) -> bool:
        """Return whether kernels exist for the model's experts, and for the replicas that are
        computed beside them."""
        layout = opened.store.layout
        has_kernels = (
            has_form(opened.layers[0].experts, layout, has_replicas=has_replicas)
            and layout.dtype in _DTYPES
        )
        return has_kernels and _runs_on(opened.model.device)

    @staticmethod
    def timed_experts(opened: MoeModel, contents: Sequence[torch.Tensor]) -> Callable[[], None]:
        layout = opened.store.layout
        first = opened.layers[0]
        arena = torch.cat(tuple(contents))
        count = len(contents)
        x = torch.zeros(1, first.hidden_size, dtype=layout.dtype, device=arena.device)
        numbers = torch.arange(count, dtype=torch.int32, device=arena.device)[None]
        y = torch.empty(count, x.shape[1], device=arena.device)
        form = full_form(
            gate_of(first.experts),
            layout,
            arena,
            [number * len(contents[0]) for number in range(count)],
            is_transposed=first.experts.is_transposed,
        )
        return lambda: form.multiply(x, numbers, y)

    def begin(self, tokens: StepTokens) -> "TritonBackend":
        experts = tokens.experts
        self._groups = None
        if len(tokens.hidden) > 1:
            self._groups = groups = SortedPairs(experts)
            sent = self._to_device(np.stack((experts.astype(np.int32).ravel(), groups.order)))
            keys = sent[0].view(experts.shape)
            weights = tokens.planned_weights() if tokens.are_planned else tokens.router_weights
            self._order = sent[1]
            self._block_tokens = kernels("gpu.experts.gated_tiles").tile_tokens(
                experts.size, self._num_experts
            )
        elif tokens.are_routed:  # nothing is copied: the device has what the router chose
            keys = tokens.ids.contiguous()
            weights = tokens.router_weights
        else:
            applied = np.ascontiguousarray(tokens.host_weights, np.float32)
            sent = self._to_device(np.stack((experts.astype(np.int32), applied.view(np.int32))))
            keys = sent[0]
            weights = sent[1].view(torch.float32)
        self._start(tokens.module, tokens.hidden, experts, keys, weights)
        return self

    def add(self, places: Sequence[Place]) -> None:
        num_experts = self._num_experts
        for form, alike in self._forms.grouped(places).items():
            numbers = {place.key % num_experts: form.number(place) for place in alike}
            self._left -= numbers.keys()
            if not self._groups or isinstance(form, GpuPublished) and len(self._hidden) <= _FEW:
                self._multiply(form, numbers, is_last=not self._left)
            elif isinstance(form, GpuFullPrecision):
                self._multiply_groups(form, numbers)
            else:
                self._add_by_torch(form, alike)

    def add_near(self, places: Sequence[Place], near: NearTier, ready: Sequence[Place]) -> None:
        """Do the same as `Backend.add_near`; `places` on the host while the GPU computes."""
        self.near.begin(self._hidden)
        self.add(ready)
        pairs, outputs = self.near.outputs(self._module, places, near, self._experts)
        self._left -= {place.key % self._num_experts for place in places}
        if self._forms.are_cut:
            self._y.index_add_(0, pairs, outputs.to(self._y.dtype))
        else:
            self._y.index_copy_(0, pairs, outputs.to(self._y.dtype))

    def add_output(self, expert: int, y: torch.Tensor) -> None:
        """Take the output of an expert, or of a segment, on its tokens [t, H], computed
        elsewhere."""
        tokens, ranks = self._assigned_to(expert)
        by_token = self._y.view(*self._experts.shape, -1)
        rows = (0 if tokens is None else tokens, ranks)
        y = y.to(by_token.dtype)
        by_token[rows] = by_token[rows] + y if self._forms.are_cut else y

    def finish(self) -> torch.Tensor:
        """Return the layer's output [T, H]; keep no tensor of the step: those of a prompt would
        otherwise stay while tokens follow it."""
        output = self._output
        if output is None:
            output = torch.empty_like(self._hidden)
            weights = self._weights.contiguous()
            kernels("gpu.experts.weighted_sum").combine(
                self._y, self._keys, weights, output, is_wide=self._is_wide
            )
        del self._y, self._keys, self._weights, self._hidden
        self._assigned = {}
        self._groups = None
        self._output = None
        return output

    def forward(
        self,
        module: nn.Module,
        hidden: torch.Tensor,
        experts: Sequence[int],
        places: Sequence[Place],
        weights: torch.Tensor,
    ) -> torch.Tensor:
        selected = np.array([experts], np.int32)
        ids = self._to_device(selected)
        self._groups = None
        self._start(module, hidden, selected, ids, weights)
        self.add(places)
        return self.finish()

    def note_layer(self, layer: int, slots: Sequence[int]) -> None:
        self.whole[layer] = self.starts(slots)

    def forward_whole(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute a whole step of a few tokens [T, H] in a layer that is noted as whole, ids and
        weights [T, K] as the router left them on the device. The host neither reads them nor
        waits."""
        ids = ids.contiguous()
        return self.forward_at(self.whole[layer], ids, hidden, ids, weights)

    def starts(self, slots: Sequence[int]) -> torch.Tensor:
        """Return the offsets of these slots for `forward_at`."""
        return self._forms.full.starts(slots)

    def compute_at(self, starts: torch.Tensor, numbers: torch.Tensor, hidden: torch.Tensor) -> None:
        """Compute those of a few tokens' experts that begin at the `numbers` [T, K] of `starts`, -1
        for the others, which `forward_at` computes."""
        y = self._outputs(numbers.numel())
        self._forms.full.multiply(hidden.contiguous(), numbers, y, starts=starts)

    def forward_at(
        self,
        starts: torch.Tensor,
        numbers: torch.Tensor,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a whole step of a few tokens [T, H] whose experts `ids` [T, K] begin at the
        `numbers` [T, K] of `starts`, with `weights` [T, K]; all on the device. A number is -1 where
        `compute_at` has computed the expert."""
        total = self._total(ids, weights, hidden)
        self._forms.full.multiply(
            hidden.contiguous(), numbers, self._outputs(ids.numel()), starts=starts, total=total
        )
        return total.out

    @property
    def has_one_form(self) -> bool:
        """True if every expert is whole, and as the checkpoint has it: only then `forward_in_turn`
        may be called."""
        return self._forms.is_one

    def forward_in_turn(
        self, hidden: torch.Tensor, given: TokenSlots, arrive: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """Queue a whole step of a few tokens [T, H]: the experts that are there, then the work of
        `arrive`, which is given the outputs [T * K, H] and brings the others, then these."""
        hidden = hidden.contiguous()
        outputs = self._outputs(given.ready.numel())
        total = self._total(given.keys, given.weights, hidden)
        self._forms.full.multiply(hidden, given.ready, outputs)
        arrive(outputs)
        self._forms.full.multiply(hidden, given.coming, outputs, total=total)
        return total.out

    def clear(self) -> None:
        """Forget where the experts of whole layers begin."""
        self.whole.clear()

    def _start(
        self,
        module: nn.Module,
        hidden: torch.Tensor,
        experts: np.ndarray,
        keys: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Take tokens and make room for their outputs; `keys` are the experts on the device."""
        self._module = module
        self._hidden = hidden.contiguous()
        self._experts = experts
        self._keys = keys
        self._weights = weights
        self._assigned: dict[int, Assigned] = {}
        is_cut = self._forms.are_cut
        self._output = None
        # The experts of a token that are not computed yet; many tokens, and segments, are added up
        # apart.
        self._left = {_NONE}
        if hidden.shape[0] == 1:
            (self._ranks,), self._y = experts.tolist(), self._outputs(experts.size)
            if is_cut:
                self._y.zero_()
            else:
                self._left = set(self._ranks) - self._left
            return
        # Segments add up to an output that is rounded once; the outputs of many tokens are as large
        # as their experts.
        dtype, new = (torch.float32, torch.zeros) if is_cut else (hidden.dtype, torch.empty)
        self._y = new(experts.size, hidden.shape[1], dtype=dtype, device=self._device)

    def _outputs(self, count: int) -> torch.Tensor:
        """Return room for the outputs of `count` pairs of tokens and experts, float32 [count, H].
        It is kept: one stream computes all steps."""
        if count not in self._kept:
            # a session forwards within it, and `generate` without
            with torch.inference_mode(False):
                self._kept[count] = torch.empty(count, self._hidden_size, device=self._device)
        return self._kept[count]

    def _assigned_to(self, expert: int) -> Assigned:
        if not self._assigned:
            self._assigned = assign(self._experts, self._device)
        return self._assigned[expert]

    def _multiply(self, form: GpuForm, numbers: dict[int, int], *, is_last: bool) -> None:
        if self._experts.shape[0] == 1:
            by_rank = [numbers.get(expert, _NONE) for expert in self._ranks]
            at = RankNumbers.of(by_rank) or self._to_device(np.array([by_rank], np.int32))
        else:
            by_rank = [
                [numbers.get(expert, _NONE) for expert in row] for row in self._experts.tolist()
            ]
            at = self._to_device(np.array(by_rank, np.int32))
        if is_last and form is self._forms.full:
            total = self._total(self._keys, self._weights, self._hidden)
            form.multiply(self._hidden, at, self._y, total=total)
            self._output = total.out
        else:
            form.multiply(self._hidden, at, self._y)

    def _multiply_groups(self, form: GpuFullPrecision, numbers: dict[int, int]) -> None:
        tiles = self._to_device(self._groups.tiles(numbers, self._block_tokens))
        sizes = {"top_k": self._experts.shape[1], "block_tokens": self._block_tokens}
        form.multiply_tiles(self._hidden, self._order, tiles, self._y, **sizes)

    def _add_by_torch(self, form: GpuForm, places: Sequence[Place]) -> None:
        for place in places:
            expert = place.key % self._num_experts
            x = gather(self._hidden, self._assigned_to(expert))
            if isinstance(form, GpuPublished):
                y = expert_forward(self._module, form.weights(place), x)
            else:
                y = self._resident.forward(self._module, place, x)
            self.add_output(expert, y)

    def _total(self, keys: torch.Tensor, weights: torch.Tensor, hidden: torch.Tensor) -> Total:
        """Return the operands with which the last kernel of tokens [T, H] adds up their experts."""
        return Total(
            keys, weights.contiguous(), torch.empty_like(hidden), self._done, self._is_wide
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        """Copy an array to the device. The driver takes a small array at once: the host does not
        wait for queued work."""
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _runs_on(device: torch.device) -> bool:
    return compiler(device) == "triton"
