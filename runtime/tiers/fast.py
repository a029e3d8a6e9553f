"""What lies in the fast tier, and how torch computes on it."""

from collections.abc import Sequence

import torch
from torch import nn

from artifacts.shape import FULL_BITS
from runtime.control.plan import NO_SLOT, Place
from runtime.model.arithmetic import expert_forward
from runtime.model.open import MoeModel
from runtime.tiers.shadow_replicas import Shadows
from runtime.tiers.slots import Slots
from runtime.tiers.slow import SlowTier
from runtime.tiers.slow_split import SegmentTier

Views = dict[str, object]


class Resident:
    """The slots, and beside them the replicas `shadows` if any stay. Views take longer to make than small experts to
    compute: they are kept."""

    def __init__(self, opened: MoeModel, slots: Slots, slow: SlowTier, shadows: Shadows | None) -> None:
        self.slots, self.slow, self.shadows = slots, slow, shadows
        self.num_experts = opened.shape.num_experts
        self._is_split = isinstance(slow, SegmentTier)
        self._views = [] if self._is_split else [opened.store.layout.views(slot) for slot in slots]
        self._segments: dict[tuple[int, int], Views] = {}  # by slot and row of the slow tier
        layout, beside = opened.store.layout, slots.beside
        self._beside = {part.name: layout.several(part, beside[part.name]) for part in layout.parts} if beside else {}
        self._rows: dict[tuple[int, int], dict[str, torch.Tensor]] = {}  # of those, by first slot and how many

    def forward(self, module: nn.Module, place: Place, x: torch.Tensor) -> torch.Tensor:
        """One expert, or a segment of one, on its tokens, x [t, H] -> [t, H]."""
        weights = self.shadows.views(place.key) if place.slot == NO_SLOT else self.weights(place)
        return expert_forward(module, weights, x, project=self.slow.projecting(place.bits))

    def weights(self, place: Place) -> Views:
        """What lies in a slot."""
        if self._is_split:
            at = place.slot, place.key // self.num_experts
            if at not in self._segments:
                self._segments[at] = self.slow.weights(place, self.slots[place.slot])
            return self._segments[at]
        return self._views[place.slot] if is_full(place) else self.slow.weights(place, self.slots[place.slot])

    def whole(self, slot: int) -> Views:
        """An expert at full precision that is not cut."""
        return self._views[slot]

    def beside(self, places: Sequence[Place]) -> dict[str, torch.Tensor] | None:
        """The parts of n whole experts [n, *shape], where they lie side by side in this order."""
        first, count = places[0].slot, len(places)
        if not self._beside or any(place.slot != first + row for row, place in enumerate(places)):
            return None
        if (first, count) not in self._rows:
            self._rows[first, count] = {name: part[first : first + count] for name, part in self._beside.items()}
        return self._rows[first, count]

    def room(self, place: Place) -> torch.Tensor:
        """As many bytes of its slot as it takes."""
        slot, nbytes = self.slots[place.slot], self.slow.num_bytes(place)
        return slot if slot.nbytes == nbytes else slot[:nbytes]


def is_full(place: Place) -> bool:
    return place.bits == FULL_BITS
