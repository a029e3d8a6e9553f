"""The near tier: experts computed where they lie, between issuing the loads of a step and collecting them."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from artifacts.shape import FULL_BITS
from runtime.control.plan import Place
from runtime.links.clock import Timeline, WallClock
from runtime.model.arithmetic import expert_forward
from runtime.model.layout import aligned
from runtime.tiers.slow import SlowTier


class NearTier:
    """Reads experts in place from RAM, or from disk through a buffer of one expert, and computes them on the CPU, at
    full precision or on a replica.

    It runs on the caller's thread: a GPU works through what was queued before meanwhile. With `bandwidth` (bytes per
    second) an expert takes at least its bytes over it, counted from `begin`: on a machine whose fast tier is the same
    CPU the near tier would otherwise cost nothing.
    """

    def __init__(self, slow: SlowTier, *, bandwidth: float | None = None) -> None:
        self._slow = slow
        self._timeline = Timeline(bandwidth) if bandwidth else None
        self._clock = WallClock()
        self._ready_at_s = 0.0
        self._buffer: torch.Tensor | None = None
        self._views: dict[tuple[int, ...], Mapping[str, object]] = {}  # by key, bits, address and size in RAM

    def begin(self, places: Sequence[Place]) -> None:
        """The emulated tier starts on these experts now."""
        if self._timeline:
            nbytes = sum(map(self._slow.num_bytes, places))
            self._ready_at_s = self._timeline.reserve(self._clock.now_s(), nbytes)

    def forward(self, module: nn.Module, place: Place, x: torch.Tensor) -> torch.Tensor:
        """One expert on its tokens, x [t, H] on the CPU -> [t, H]."""
        return expert_forward(module, self._weights(place), x, project=self._slow.projecting(place.bits))

    def lying(self, places: Sequence[Place]) -> list[Mapping[str, object]] | None:
        """What each of some experts at one precision is multiplied by, where it lies; None if that is the disk."""
        if self._lying(places[0]) is None:
            return None
        return [self._weights(place) for place in places]

    def _weights(self, place: Place) -> Mapping[str, object]:
        """Views take longer to make than small experts to compute: those of what stays where it is are kept."""
        content = self.content(place)
        if content is self._buffer:
            return self._slow.weights(place, content)
        at = place.key, place.bits, content.data_ptr(), len(content)
        if at not in self._views:
            self._views[at] = self._slow.weights(place, content)
        return self._views[at]

    def finish(self) -> None:
        """Return when the emulated tier would have what was begun."""
        self._clock.wait_until(self._ready_at_s)

    def conditions(self) -> dict[str, float]:
        return {"near_gbps": self._timeline.bandwidth / 1e9} if self._timeline else {}

    def content(self, place: Place) -> torch.Tensor:
        """Its bytes, uint8 on the CPU, good until the next are asked for."""
        if (lying := self._lying(place)) is not None:
            return lying
        if self._buffer is None:
            self._buffer = aligned(max(self._slow.nbytes(bits) for bits in self._slow.stores))
        self._slow.read(*self._at(place), self._buffer, bits=place.bits)
        return self._buffer

    def _lying(self, place: Place) -> torch.Tensor | None:
        return self._slow.view(*self._at(place), bits=place.bits)

    def _at(self, place: Place) -> tuple[int, int]:
        return divmod(place.key, self._slow.stores[FULL_BITS].shape.num_experts)
