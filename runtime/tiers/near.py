"""The near tier: experts computed where they lie, while the loads of a step are under way."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from artifacts.shape import FULL_BITS
from runtime.control.plan import Place
from runtime.links.clock import Clock, Timeline, WallClock
from runtime.model.arithmetic import expert_forward
from runtime.model.layout import aligned
from runtime.tiers.slow import SlowTier


class NearTier:
    """Reads experts in place from RAM, or from disk through a buffer of one expert, and computes
    them on the CPU, at full precision or on a replica.

    It runs on the caller's thread, while a GPU works through its queue. With `bandwidth` (bytes per
    second) an expert takes at least its bytes divided by the bandwidth, in seconds from `begin`.
    Without that, the near tier would cost nothing on a machine whose fast tier is the same CPU.
    """

    def __init__(self, slow: SlowTier, *, bandwidth: float | None = None) -> None:
        self._slow = slow
        self._timeline = Timeline(bandwidth) if bandwidth else None
        self.clock: Clock = WallClock()
        self._ready_at_s = 0.0
        self._buffer: torch.Tensor | None = None
        self._views: dict[
            tuple[int, ...], Mapping[str, object]
        ] = {}  # by key, bits, address and size in RAM

    def begin(self, places: Sequence[Place]) -> None:
        """Start the emulated tier on these experts."""
        if self._timeline:
            nbytes = sum(map(self._slow.num_bytes, places))
            self._ready_at_s = self._timeline.reserve(self.clock.now_s(), nbytes)

    def forward(self, module: nn.Module, place: Place, x: torch.Tensor) -> torch.Tensor:
        """Compute one expert on its tokens, x [t, H] on the CPU -> [t, H]."""
        return expert_forward(
            module, self._weights(place), x, project=self._slow.projection(place.bits)
        )

    def views_in_ram(self, places: Sequence[Place]) -> list[Mapping[str, object]] | None:
        """Return views of each of some experts at one precision; None where they are on disk."""
        if self._in_ram(places[0]) is None:
            return None
        return [self._weights(place) for place in places]

    def contents_in_ram(self, places: Sequence[Place]) -> list[torch.Tensor] | None:
        """Return the bytes of some experts, which stay valid; None where any is on disk."""
        contents = list(map(self._in_ram, places))
        return None if any(content is None for content in contents) else contents

    def content(self, place: Place) -> torch.Tensor:
        """Return the expert's bytes, uint8 on the CPU, valid until the next call."""
        if (content := self._in_ram(place)) is not None:
            return content
        if self._buffer is None:
            self._buffer = aligned(max(self._slow.nbytes(bits) for bits in self._slow.stores))
        self._slow.read(*self._at(place), self._buffer, bits=place.bits)
        return self._buffer

    def finish(self) -> None:
        """Wait until the emulated tier would have computed the experts of `begin`."""
        self.clock.wait_until(self._ready_at_s)

    def conditions(self) -> dict[str, float]:
        """Return the emulated bandwidth, for a receipt."""
        return {"near_gbps": self._timeline.bandwidth / 1e9} if self._timeline else {}

    def _weights(self, place: Place) -> Mapping[str, object]:
        """Return views of an expert. Those in RAM are kept: making them takes longer than computing
        a small expert."""
        content = self.content(place)
        if content is self._buffer:
            return self._slow.weights(place, content)
        at = place.key, place.bits, content.data_ptr(), len(content)
        if at not in self._views:
            self._views[at] = self._slow.weights(place, content)
        return self._views[at]

    def _in_ram(self, place: Place) -> torch.Tensor | None:
        return self._slow.view(*self._at(place), bits=place.bits)

    def _at(self, place: Place) -> tuple[int, int]:
        return divmod(place.key, self._slow.stores[FULL_BITS].shape.num_experts)
