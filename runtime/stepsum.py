"""The output of one layer step as torch adds it up: bit for bit the sum that the model's own code makes."""

import torch
from torch import nn

from runtime.experts import Assigned, accumulate, gather, weigh
from runtime.plan import Place
from runtime.resident import Resident, is_full
from runtime.together import OneByOne, Together


class StepSum:
    """Takes experts as they are computed, in any order. `assigned` by expert; `weights` [T, K] of the router."""

    def __init__(
        self,
        module: nn.Module,
        resident: Resident,
        together: Together | OneByOne | None,
        *,
        hidden: torch.Tensor,
        assigned: dict[int, Assigned],
        weights: torch.Tensor,
    ) -> None:
        self._module, self._resident, self._together = module, resident, together
        self._hidden, self._assigned, self._weights = hidden, assigned, weights
        self._outputs: dict[int, torch.Tensor] = {}

    def assigned(self, expert: int) -> Assigned:
        """The tokens it serves."""
        return self._assigned[expert]

    def add(self, places: list[Place]) -> None:
        """Compute what lies at `places`, all there."""
        if self._together and len(self._hidden) == 1 and len(places) > 1 and all(map(is_full, places)):
            weights = [self._resident.weights(place) for place in places]
            outputs = self._together.forward(self._module, weights, self._hidden)
            for place, y in zip(places, outputs.unbind(), strict=True):
                self.add_output(place.key % self._resident.num_experts, y)
            return
        for place in places:
            expert = place.key % self._resident.num_experts
            x = gather(self._hidden, self._assigned[expert])
            self.add_output(expert, self._resident.forward(self._module, place, x))

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
