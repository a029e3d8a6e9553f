"""The experts in the fast tier, and how torch computes them."""

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import nn

from artifacts.shape import FULL_BITS
from runtime.control.plan import NO_SLOT, Place
from runtime.devices import is_host
from runtime.model.arithmetic import expert_forward
from runtime.model.open import MoeModel
from runtime.model.quantised.quantised_matrix import project_in_tiles
from runtime.tiers.shadow_replicas import Shadows
from runtime.tiers.slots import Slots
from runtime.tiers.slow import SlowTier

Views = dict[str, object]
_slot = attrgetter("slot")


class ResidentExperts:
    """The contents of the slots, and the replicas `shadows` beside them if there are any.

    Views are kept: making them takes longer than computing a small expert. If `is_fused`, a CPU
    dequantises and multiplies experts in few bits by tiles, and widens those in float16, which need
    not give the model's own bits.
    """

    def __init__(
        self,
        opened: MoeModel,
        slots: Slots,
        slow: SlowTier,
        shadows: Shadows | None,
        *,
        is_fused: bool = False,
    ) -> None:
        self.slots = slots
        self.slow = slow
        self.shadows = shadows
        self.num_experts = opened.shape.num_experts
        self._is_split = slow.is_split
        layout = opened.store.layout
        has_tiles = layout.codes in ("published", "mixed") or opened.dtype is torch.float16
        self._in_tiles = (
            is_fused and has_tiles and not self._is_split and is_host(opened.model.device)
        )
        self._views = [] if self._is_split else [layout.views(slot) for slot in slots]
        # By slot the part that a whole expert takes.
        self._rooms = [] if self._is_split else [slot[: slow.nbytes(FULL_BITS)] for slot in slots]
        self._segments: dict[tuple[int, int], Views] = {}  # by slot and row of the slow tier
        by_part = slots.by_part
        parts = layout.parts if by_part else ()
        self._by_part = {part.name: layout.several(part, by_part[part.name]) for part in parts}
        self._rows: dict[
            tuple[int, int], dict[str, torch.Tensor]
        ] = {}  # rows of _by_part, by first slot and count

    def forward(self, module: nn.Module, place: Place, x: torch.Tensor) -> torch.Tensor:
        """Compute one expert, or a segment of one, on its tokens, x [t, H] -> [t, H]."""
        weights = self.shadows.views(place.key) if place.slot == NO_SLOT else self.weights(place)
        project = (
            project_in_tiles
            if self._in_tiles and place.bits == FULL_BITS
            else self.slow.projection(place.bits)
        )
        return expert_forward(module, weights, x, project=project)

    def weights(self, place: Place) -> Views:
        """Return views of the expert or segment in a slot."""
        if self._is_split:
            at = place.slot, place.key // self.num_experts
            if at not in self._segments:
                self._segments[at] = self.slow.weights(place, self.slots[place.slot])
            return self._segments[at]
        return (
            self._views[place.slot]
            if place.bits == FULL_BITS
            else self.slow.weights(place, self.slots[place.slot])
        )

    def whole(self, slot: int) -> Views:
        """Return views of an expert at full precision that is not cut."""
        return self._views[slot]

    def together(
        self, places: Sequence[Place]
    ) -> tuple[list[Views], dict[str, torch.Tensor] | None]:
        """Return views of n whole experts, of ascending slots, and each part of all of them, [n,
        *shape] by name, or None where they do not lie side by side."""
        views = list(map(self._views.__getitem__, map(_slot, places)))
        first = places[0].slot
        count = len(places)
        if not self._by_part or places[-1].slot - first != count - 1:
            return views, None
        if (first, count) not in self._rows:
            self._rows[first, count] = {
                name: part[first : first + count] for name, part in self._by_part.items()
            }
        return views, self._rows[first, count]

    def room(self, place: Place) -> torch.Tensor:
        """Return the part of its slot that the expert, replica or segment takes."""
        if place.bits == FULL_BITS and self._rooms:
            return self._rooms[place.slot]
        slot = self.slots[place.slot]
        nbytes = self.slow.num_bytes(place)
        return slot if slot.nbytes == nbytes else slot[:nbytes]
