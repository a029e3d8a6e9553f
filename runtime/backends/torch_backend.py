"""Output of a layer step by torch: bit for bit the sum that the model's own code makes, unless it
is fused."""

from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from runtime.backends.across_devices import AcrossDevices
from runtime.backends.cpu.forms_cpu import TokenKernels
from runtime.control.plan import Place
from runtime.kernels.batched import BatchedExperts, SequentialExperts, Views
from runtime.model.arithmetic import Assigned, accumulate, assign, gather, weigh
from runtime.tiers.fast import ResidentExperts, is_full
from runtime.tiers.near import NearTier

_slot = attrgetter("slot")


class TorchOutput:
    """Takes experts as they are computed, in any order, and adds them up in the model's order.

    `batched`, if given, computes several experts of one token in one call with the same bits.
    `kernels` computes one token's replicas of few bits, which need not match the model's bits; if
    `is_fused`, also any expert on few tokens. The model adds experts up in `sum_dtype`.
    """

    name: ClassVar[str] = "torch"

    def __init__(
        self,
        resident: ResidentExperts,
        batched: BatchedExperts | SequentialExperts | None,
        kernels: TokenKernels | None,
        *,
        sum_dtype: torch.dtype,
        is_fused: bool = False,
    ) -> None:
        self._resident = resident
        self._batched = batched
        self._kernels = kernels
        self._sum_dtype = sum_dtype
        self._few = kernels if is_fused else None
        self._num_experts = resident.num_experts
        self.clear()

    def begin(
        self, module: nn.Module, hidden: torch.Tensor, experts: np.ndarray, weights: torch.Tensor
    ) -> None:
        """Begin tokens [T, H] that go to `experts` [T, K], -1 for none, with `weights` [T, K]."""
        self._module = module
        self._hidden = hidden
        self._weights = weights
        self._assigned = assign(experts, hidden.device)
        self._packed = self._kernels if len(hidden) == 1 else None  # the kernels take one token
        # An expert that a token names twice is given it as two rows, which one product rounds
        # otherwise than one row.
        self._is_one_row = len(hidden) == 1 and all(
            each.tokens is None for each in self._assigned.values()
        )
        if self._resident.slots.are_apart:
            self._across = AcrossDevices(self._resident, hidden, experts)

    def add(self, places: Sequence[Place]) -> None:
        """Compute the experts in these slots, or on the replicas that stay beside them; all must be
        there."""
        if packed := [place for place in places if self._is_packed(place)]:
            self._add_packed(packed, self._packed.starts(packed))
        others = [place for place in places if not self._is_packed(place)]
        if self._batched and self._is_one_row and len(others) > 1 and all(map(is_full, others)):
            others.sort(key=_slot)
            views = [self._resident.weights(place) for place in others]
            self._add_batch(others, views, beside=self._resident.beside(others))
            return
        for place in others:
            self.add_output(place.key % self._num_experts, self._forward(place))

    def add_near(self, places: Sequence[Place], near: NearTier, ready: Sequence[Place]) -> None:
        """Compute `places` in the near tier, and the `ready` experts as by `add`, before them or
        together with them."""
        if (
            self._can_batch(places)
            and self._can_batch(ready)
            and (views := near.views_in_ram(places))
        ):
            self._add_batch([*places, *ready], [*views, *map(self._resident.weights, ready)])
            return
        keys = [place.key % self._num_experts for place in places]
        host = self._hidden.cpu()
        assigned = [_on_host(self._assigned[key]) for key in keys]
        self.add(ready)  # after the copies to the host: a GPU computes while the host does
        for place, key, own in zip(places, keys, assigned, strict=True):
            if self._is_packed(place):
                self._add_packed([place], [near.content(place).data_ptr()])
            else:
                self.add_output(key, self._forward_near(place, near, gather(host, own)))

    def add_output(self, expert: int, y: torch.Tensor) -> None:
        """Take the output of an expert on its tokens [t, H], or of one of its segments, which add
        up to it."""
        self._outputs[expert] = self._outputs[expert] + y if expert in self._outputs else y

    def finish(self) -> torch.Tensor:
        """Return the layer's output [T, H]. Experts add up in ascending order, or the sum would
        round differently."""
        out = torch.zeros_like(self._hidden, dtype=self._sum_dtype)
        dtype = self._hidden.dtype
        for expert in sorted(self._outputs):
            assigned = self._assigned[expert]
            accumulate(out, weigh(self._outputs[expert], self._weights, assigned), assigned)
        self.clear()
        return out.to(dtype)

    def forward(
        self,
        module: nn.Module,
        hidden: torch.Tensor,
        experts: Sequence[int],
        places: Sequence[Place],
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a whole step of one token [1, H] whose `experts`, none twice, are all there, with
        `weights` [1, K]: [1, H].

        It makes few calls: one more takes as long as a small expert.
        """
        shares = (
            (self._forward_all(module, hidden, places) * weights.reshape(-1, 1, 1))
            .to(self._sum_dtype)
            .unbind()
        )
        first, *others = sorted(range(len(experts)), key=experts.__getitem__)
        out = shares[
            first
        ]  # eager's sum starts from zeros, which would change the sign of a zero and nothing else
        for rank in others:
            out += shares[rank]
        return out.to(hidden.dtype)

    def clear(self) -> None:
        """Drop an unfinished step: the tensors of a prompt would stay in memory otherwise."""
        self._module = self._hidden = self._weights = self._packed = self._across = None
        self._assigned: dict[int, Assigned] = {}
        self._outputs: dict[int, torch.Tensor] = {}

    def _forward(self, place: Place) -> torch.Tensor:
        """Return the output [t, H] of one expert, or of a segment of one, on its tokens."""
        expert = place.key % self._num_experts
        if self._across:
            return self._across.forward(self._module, place, expert)
        x = gather(self._hidden, self._assigned[expert])
        if self._few and self._few.takes(place, len(x)):
            [start] = self._few.starts([place])
            return self._few.forward(place, start, x)
        return self._resident.forward(self._module, place, x)

    def _forward_near(self, place: Place, near: NearTier, x: torch.Tensor) -> torch.Tensor:
        """Return the output of an expert in the near tier on its tokens, x [t, H] on the host."""
        if self._few and self._few.takes(place, len(x)):
            return self._few.forward(place, near.content(place).data_ptr(), x)
        return near.forward(self._module, place, x).to(self._hidden.device, non_blocking=True)

    def _forward_all(
        self, module: nn.Module, hidden: torch.Tensor, places: Sequence[Place]
    ) -> torch.Tensor:
        """Return the output of each expert, all of them packed or none, for a token [1, H]: [n, 1,
        H]."""
        if self._kernels and self._kernels.is_packed(places[0].bits):
            return self._kernels.outputs(hidden, places, self._kernels.starts(places))
        if self._batched and is_full(places[0]):
            return self._batched.forward(
                module, [self._resident.whole(place.slot) for place in places], hidden
            )
        return torch.stack([self._resident.forward(module, place, hidden) for place in places])

    def _is_packed(self, place: Place) -> bool:
        return self._packed is not None and self._packed.is_packed(place.bits)

    def _can_batch(self, places: Sequence[Place]) -> bool:
        """Return whether these experts of the step can be computed in one call with others."""
        if not self._batched or not self._is_one_row:
            return False
        return all(is_full(place) and not self._is_packed(place) for place in places)

    def _add_batch(
        self, places: Sequence[Place], views: Sequence[Views], *, beside: Views | None = None
    ) -> None:
        """Compute one token's whole experts in one call, wherever they lie."""
        self._add_outputs(
            places, self._batched.forward(self._module, views, self._hidden, beside=beside)
        )

    def _add_packed(self, places: Sequence[Place], starts: Sequence[int]) -> None:
        """Compute one token's replicas at these addresses."""
        self._add_outputs(places, self._packed.outputs(self._hidden, places, starts))

    def _add_outputs(self, places: Sequence[Place], outputs: torch.Tensor) -> None:
        """Take [n, 1, H] of one token."""
        for place, y in zip(places, outputs.unbind(), strict=True):
            self.add_output(place.key % self._num_experts, y)


def _on_host(assigned: Assigned) -> Assigned:
    return (
        assigned
        if assigned.tokens is None
        else Assigned(assigned.tokens.cpu(), assigned.ranks.cpu())
    )
