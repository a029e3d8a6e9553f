"""The output of one layer step as torch adds it up: bit for bit the sum that the model's own code makes."""

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import nn

from runtime.control.plan import Place
from runtime.engine.across_devices import Apart
from runtime.engine.output_cpu import OneToken
from runtime.kernels.batched import BatchedExperts, SequentialExperts, Views
from runtime.model.arithmetic import Assigned, accumulate, gather, weigh
from runtime.tiers.fast import Resident, is_full

_slot = attrgetter("slot")


class StepSum:
    """Takes experts as they are computed, in any order. `assigned` by expert; `weights` [T, K] of the router.

    `packed`: what computes one token's replicas of few bits, which have no bits of the model to keep; `apart`: what
    computes where slots are on several devices.
    """

    def __init__(
        self,
        module: nn.Module,
        resident: Resident,
        together: BatchedExperts | SequentialExperts | None,
        packed: OneToken | None,
        *,
        hidden: torch.Tensor,
        assigned: dict[int, Assigned],
        weights: torch.Tensor,
        apart: Apart | None = None,
    ) -> None:
        self._module, self._resident, self._together, self._apart = module, resident, together, apart
        self._packed = packed if len(hidden) == 1 else None
        self._hidden, self._assigned, self._weights = hidden, assigned, weights
        self._outputs: dict[int, torch.Tensor] = {}

    def assigned(self, expert: int) -> Assigned:
        """The tokens it serves."""
        return self._assigned[expert]

    def add(self, places: Sequence[Place]) -> None:
        """Compute what lies at `places`, all there."""
        if low := [place for place in places if self.computes(place)]:
            self._add_packed(low, self._packed.starts(low))
        full = [place for place in places if not self.computes(place)]
        if self._together and len(self._hidden) == 1 and len(full) > 1 and all(map(is_full, full)):
            full.sort(key=_slot)
            weights = [self._resident.weights(place) for place in full]
            self.add_together(full, weights, beside=self._resident.beside(full))
            return
        for place in full:
            expert = self._expert(place)
            if self._apart:
                self.add_output(expert, self._apart.forward(self._module, place, expert))
                continue
            x = gather(self._hidden, self._assigned[expert])
            self.add_output(expert, self._resident.forward(self._module, place, x))

    def add_together(self, places: Sequence[Place], weights: Sequence[Views], *, beside: Views | None = None) -> None:
        """One token's whole experts, wherever they lie, as `BatchedExperts` takes them."""
        self._add_outputs(places, self._together.forward(self._module, weights, self._hidden, beside=beside))

    def computes(self, place: Place) -> bool:
        """Whether it computes such an expert itself, here and by `add_elsewhere`."""
        return self._packed is not None and self._packed.is_packed(place.bits)

    def add_elsewhere(self, place: Place, content: torch.Tensor) -> None:
        """Compute one token's replica that lies outside the fast tier: `content`, uint8 on the CPU."""
        self._add_packed([place], [content.data_ptr()])

    def add_output(self, expert: int, y: torch.Tensor) -> None:
        """An expert's output on its tokens [t, H], or that of a segment: they add up to it."""
        self._outputs[expert] = self._outputs[expert] + y if expert in self._outputs else y

    def finish(self) -> torch.Tensor:
        """[T, H]. Experts add up in ascending order, or the sum would round differently."""
        out = torch.zeros_like(self._hidden)
        for expert in sorted(self._outputs):
            own = self._assigned[expert]
            accumulate(out, weigh(self._outputs[expert], self._weights, own), own)
        return out

    def _add_packed(self, places: Sequence[Place], starts: Sequence[int]) -> None:
        self._add_outputs(places, self._packed.outputs(self._hidden, places, starts))

    def _add_outputs(self, places: Sequence[Place], outputs: torch.Tensor) -> None:
        """[n, 1, H] of one token."""
        for place, y in zip(places, outputs.unbind(), strict=True):
            self.add_output(self._expert(place), y)

    def _expert(self, place: Place) -> int:
        return place.key % self._resident.num_experts
