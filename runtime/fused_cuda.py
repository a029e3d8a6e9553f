"""A few tokens' experts on a GPU in three kernels, wherever in the arena of slots they lie.

It gives what the model's own code gives up to the order of additions within a product, as `runtime.fused` on a CPU.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import torch
from torch import nn

from artifacts.replicas import FULL_BITS
from runtime.experts import Assigned, assign, gather
from runtime.model import MoeModel
from runtime.plan import NO_SLOT, Place
from runtime.resident import Resident
from runtime.together import is_plain
from runtime.weights import ExpertLayout

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@cache
def fused_triton() -> ModuleType:
    """Imported when it is first needed: triton is not everywhere, and decides as it is imported how it runs."""
    return import_module("runtime.fused_triton")


class FusedCuda:
    """A few tokens at a time: `begin`, `add` what is there as often as it takes, `finish`.

    What is not at full precision in a slot, replicas and what is computed near, torch computes.
    """

    def __init__(self, opened: MoeModel, resident: Resident) -> None:
        layout, slots = opened.store.layout, resident.slots
        self._resident, self._num_experts = resident, opened.shape.num_experts
        self._kernels, self._device = _Kernels(opened), slots.device
        self._arena = slots.arena.view(layout.dtype)
        self._starts = _in_weights(slots.starts, layout.dtype, slots.device)
        self.whole: dict[int, torch.Tensor] = {}  # [E] where each expert begins, of layers that are wholly there

    @staticmethod
    def suits(opened: MoeModel) -> bool:
        """Whether there are kernels for such experts: gated by SiLU, without bias, each matrix by rows."""
        layout = opened.store.layout
        is_full = isinstance(layout, ExpertLayout) and layout.dtype in _DTYPES
        return is_full and is_plain(opened.layers[0].experts) and _runs_on(opened.model.device)

    def begin(
        self, module: nn.Module, hidden: torch.Tensor, experts: Sequence[int] | np.ndarray, weights: np.ndarray
    ) -> None:
        """Tokens [T, H] that go to `experts` [T, K] or, of one token, [K]: -1 is none. `weights` float32, likewise."""
        self._module, self._hidden = module, hidden
        self._experts = np.atleast_2d(np.asarray(experts, np.int32))
        shares = np.ascontiguousarray(np.atleast_2d(weights), np.float32)
        sent = self._to_device(np.stack((self._experts, shares.view(np.int32))))
        self._keys, self._weights = sent[0], sent[1].view(torch.float32)
        self._y = torch.empty(self._experts.size, hidden.shape[1], device=self._device)
        self._assigned: dict[int, Assigned] = {}

    def forward(
        self, hidden: torch.Tensor, experts: Sequence[int], places: Sequence[Place], weights: torch.Tensor
    ) -> torch.Tensor:
        """A token [1, H] whose experts all lie in slots and whole, with `weights` [1, K]: [1, H]."""
        sent = self._to_device(np.array([experts, [place.slot for place in places]], np.int32))
        return self._kernels.forward(hidden, sent[1:], self._starts, self._arena, keys=sent[:1], weights=weights)

    def know(self, layer: int, slots: Sequence[int]) -> None:
        """Every expert of a layer lies in one of `slots` [E]."""
        self.whole[layer] = self._starts[torch.tensor(slots, device=self._device)]

    def settled(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Tokens [T, H] of a layer that is wholly there, ids and weights [T, K] as the router left them on the device:
        the host neither reads them nor waits."""
        return self._kernels.forward(hidden, ids, self.whole[layer], self._arena, keys=ids, weights=weights)

    def assigned(self, expert: int) -> Assigned:
        """The tokens it serves."""
        if not self._assigned:
            self._assigned = assign(self._experts, self._device)
        return self._assigned[expert]

    def add(self, places: Sequence[Place]) -> None:
        """Compute what lies at `places`, all there."""
        numbers = np.full(self._experts.shape, NO_SLOT, np.int32)
        for place in places:
            expert = place.key % self._num_experts
            if place.bits == FULL_BITS and place.slot != NO_SLOT:
                numbers[self._experts == expert] = place.slot
            else:
                x = gather(self._hidden, self.assigned(expert))
                self.add_output(expert, self._resident.forward(self._module, place, x))
        if (numbers != NO_SLOT).any():
            self._kernels.multiply(self._hidden, self._to_device(numbers), self._starts, self._arena, self._y)

    def computes(self, place: Place) -> bool:
        """What lies outside the slots torch computes."""
        return False

    def add_output(self, expert: int, y: torch.Tensor) -> None:
        """An expert's output on its tokens [t, H], computed elsewhere."""
        tokens, ranks = self.assigned(expert)
        by_token = self._y.view(*self._experts.shape, -1)
        by_token[0 if tokens is None else tokens, ranks] = y.float()

    def finish(self) -> torch.Tensor:
        """The layer's output [T, H]."""
        return self._kernels.combine(self._y, self._keys, self._weights, self._hidden)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        """The driver takes so small an array at once: the host waits for nothing that is queued."""
        return torch.from_numpy(array).to(self._device, non_blocking=True)


class _Kernels:
    """The kernels, with the sizes of one model's experts."""

    def __init__(self, opened: MoeModel) -> None:
        into, out_of = opened.store.layout.parts
        size = opened.store.layout.dtype.itemsize
        self._offsets = into.offset // size, out_of.offset // size
        self._neurons = opened.layers[0].num_neurons

    def multiply(
        self, x: torch.Tensor, numbers: torch.Tensor, starts: torch.Tensor, arena: torch.Tensor, y: torch.Tensor
    ) -> None:
        """Write the rows of y [T * K, H] of pairs [T, K] whose number of a start is not negative."""
        inner = torch.empty(numbers.numel(), self._neurons, dtype=arena.dtype, device=arena.device)
        x = x.contiguous()
        fused_triton().multiply(x, numbers, starts, arena, offsets=self._offsets, inner=inner, y=y)

    def combine(self, y: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """[T, H] of `like`'s type."""
        out = torch.empty_like(like)
        fused_triton().combine(y, keys, weights.contiguous(), out)
        return out

    def forward(
        self,
        x: torch.Tensor,
        numbers: torch.Tensor,
        starts: torch.Tensor,
        arena: torch.Tensor,
        *,
        keys: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """All of it, where every pair has its expert."""
        y = torch.empty(numbers.numel(), x.shape[1], device=x.device)
        self.multiply(x, numbers.contiguous(), starts, arena, y)
        return self.combine(y, keys.contiguous(), weights, x)


def alone(opened: MoeModel, contents: Sequence[torch.Tensor]) -> Callable[[int], None]:
    """Computes expert number i of `contents`, uint8 on the GPU, on one token and forgets it: to be timed."""
    kernels, dtype, device = _Kernels(opened), opened.store.layout.dtype, contents[0].device
    x = torch.zeros(1, opened.layers[0].shapes["down_proj"][0], dtype=dtype, device=device)
    zero, y = torch.zeros(1, 1, dtype=torch.int32, device=device), torch.empty(1, x.shape[1], device=device)
    arenas = [content.view(dtype) for content in contents]
    return lambda turn: kernels.multiply(x, zero, zero, arenas[turn % len(arenas)], y)


def _runs_on(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


def _in_weights(starts: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Bytes from the beginning of the arena as weights."""
    return torch.tensor([start // dtype.itemsize for start in starts], dtype=torch.int64, device=device)
