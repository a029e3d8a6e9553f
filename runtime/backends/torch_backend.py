"""A step's experts by torch: bit for bit the sum that the model's own code makes, unless it is
fused."""

from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from artifacts.quantisation.widths import Width
from artifacts.shape import FULL_BITS
from runtime.backends.backend import Backend, StepTokens
from runtime.backends.cpu.forms_cpu import TokenKernels
from runtime.control.plan import Place
from runtime.devices import made_current
from runtime.kernels.batched import BatchedExperts, SequentialExperts
from runtime.model.arithmetic import Assigned, accumulate, assign, gather, weigh
from runtime.tiers.fast import ResidentExperts
from runtime.tiers.near import NearTier

Batched = BatchedExperts | SequentialExperts
_slot = attrgetter("slot")
_bits = attrgetter("bits")
_NO_BITS: frozenset[Width] = frozenset()
_WHOLE: set[Width] = {FULL_BITS}


class TorchBackend(Backend):
    """Takes experts as they are computed, in any order, and adds them up in the model's order.

    `batched`, if given, computes several experts of one token in one call with the same bits.
    `kernels` computes one token's replicas of few bits, which need not match the model's bits; if
    `is_fused`, also any expert on few tokens. The model adds experts up in `sum_dtype`.
    """

    name: ClassVar[str] = "torch"

    def __init__(
        self,
        resident: ResidentExperts,
        batched: Batched | None,
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

    def begin(self, tokens: StepTokens) -> "TorchBackend":
        hidden = tokens.hidden
        self._module = tokens.module
        self._hidden = hidden
        self._weights = tokens.planned_weights() if tokens.are_planned else tokens.router_weights
        self._assigned = assign(tokens.experts, hidden.device)
        # The kernels take one token.
        self._packed_bits = (
            self._kernels.packed_bits if self._kernels and len(hidden) == 1 else _NO_BITS
        )
        # An expert that a token names twice is given it as two rows, which one product rounds
        # otherwise than one row.
        first = next(iter(self._assigned.values()), None)
        self._is_one_row = len(hidden) == 1 and (first is None or first.tokens is None)
        if self._resident.slots.are_apart:
            self._across = AcrossDevices(self._resident, hidden, tokens.experts)
        return self

    def add(self, places: Sequence[Place]) -> None:
        if self._packed_bits:
            packed = [place for place in places if place.bits in self._packed_bits]
            if packed:
                self._add_packed(packed, self._kernels.starts(packed))
            places = [place for place in places if place.bits not in self._packed_bits]
        if len(places) > 1 and self._can_batch(places):
            places = sorted(places, key=_slot)
            views, beside = self._resident.together(places)
            outputs = self._batched.forward(self._module, views, self._hidden, beside=beside)
            self._add_outputs(places, outputs)
            return
        for place in places:
            self.add_output(place.key % self._num_experts, self._forward(place))

    def add_near(self, places: Sequence[Place], near: NearTier, ready: Sequence[Place]) -> None:
        if (
            self._can_batch(places)
            and self._can_batch(ready)
            and (views := near.views_in_ram(places))
        ):
            views += map(self._resident.weights, ready)
            outputs = self._batched.forward(self._module, views, self._hidden)
            self._add_outputs([*places, *ready], outputs)
            return
        keys = [place.key % self._num_experts for place in places]
        host = self._hidden.cpu()
        assigned = [_on_host(self._assigned[key]) for key in keys]
        self.add(ready)  # after the copies to the host: a GPU computes while the host does
        for place, key, own in zip(places, keys, assigned, strict=True):
            if place.bits in self._packed_bits:
                self._add_packed([place], [near.content(place).data_ptr()])
            else:
                self.add_output(key, self._forward_near(place, near, gather(host, own)))

    def add_output(self, expert: int, y: torch.Tensor) -> None:
        """Take the output of an expert on its tokens [t, H], or of one of its segments, which add
        up to it."""
        self._outputs[expert] = self._outputs[expert] + y if expert in self._outputs else y

    def finish(self) -> torch.Tensor:
        out = torch.zeros_like(self._hidden, dtype=self._sum_dtype)
        dtype = self._hidden.dtype
        weights = self._weights
        for expert, y in sorted(self._outputs.items()):
            own = self._assigned[expert]
            if own.tokens is None:  # as `weigh` and `accumulate`, with fewer calls
                out.add_((y * weights[:, own.ranks : own.ranks + 1]).to(out.dtype))
            else:
                accumulate(out, weigh(y, weights, own), own)
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
        """Do the same as `Backend.forward` in few calls: one more takes as long as a small
        expert."""
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
        self._module = self._hidden = self._weights = self._across = None
        self._packed_bits = _NO_BITS
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
        if self._kernels and places[0].bits in self._kernels.packed_bits:
            return self._kernels.outputs(hidden, places, self._kernels.starts(places))
        if self._batched and places[0].bits == FULL_BITS:
            return self._batched.forward(
                module, [self._resident.whole(place.slot) for place in places], hidden
            )
        return torch.stack([self._resident.forward(module, place, hidden) for place in places])

    def _can_batch(self, places: Sequence[Place]) -> bool:
        """Return whether these experts of the step can be computed in one call with others."""
        widths = set(map(_bits, places))
        are_whole = self._packed_bits.isdisjoint(widths) and widths <= _WHOLE
        return self._batched is not None and self._is_one_row and are_whole

    def _add_packed(self, places: Sequence[Place], starts: Sequence[int]) -> None:
        """Compute one token's replicas at these addresses."""
        self._add_outputs(places, self._kernels.outputs(self._hidden, places, starts))

    def _add_outputs(self, places: Sequence[Place], outputs: torch.Tensor) -> None:
        """Take [n, 1, H] of one token."""
        held = self._outputs
        for place, y in zip(places, outputs.unbind(), strict=True):
            expert = place.key % self._num_experts
            held[expert] = held[expert] + y if expert in held else y


def _on_host(assigned: Assigned) -> Assigned:
    return (
        assigned
        if assigned.tokens is None
        else Assigned(assigned.tokens.cpu(), assigned.ranks.cpu())
    )


class AcrossDevices:
    """The tokens `hidden` [T, H] of a step on devices that share no memory, sent to the experts
    `selected` [T, K], -1 for none: copied to each device once, and outputs copied back to the
    first.

    No project machine has had two GPUs: tests cover the bookkeeping, on one device.
    """

    def __init__(
        self, resident: ResidentExperts, hidden: torch.Tensor, selected: np.ndarray
    ) -> None:
        self._resident = resident
        self._hidden = hidden
        self._selected = selected
        self._copies: dict[torch.device, tuple[torch.Tensor, dict[int, Assigned]]] = {}

    def forward(self, module: nn.Module, place: Place, expert: int) -> torch.Tensor:
        """Compute one expert on its tokens, on the device of its slot: [t, H], on the device of the
        tokens."""
        device = self._resident.slots[place.slot].device
        hidden, assigned = self._copy_on(device)
        with made_current(device):
            y = self._resident.forward(module, place, gather(hidden, assigned[expert]))
        return y.to(self._hidden.device, non_blocking=True)

    def _copy_on(self, device: torch.device) -> tuple[torch.Tensor, dict[int, Assigned]]:
        if device not in self._copies:
            self._copies[device] = (
                self._hidden.to(device, non_blocking=True),
                assign(self._selected, device),
            )
        return self._copies[device]
