"""The near tier: experts computed where they lie, between issuing the loads of a step and collecting them."""

import torch
from torch import nn

from runtime.clock import Timeline, WallClock
from runtime.experts import expert_forward
from runtime.weights import DiskStore, RamStore, aligned


class NearTier:
    """Reads experts in place from RAM, or from disk through a buffer of one expert, and computes them on the CPU.

    It runs on the caller's thread: a GPU works through what was queued before meanwhile. With `bandwidth` (bytes per
    second) an expert takes at least its bytes over it, counted from `begin`: on a machine whose fast tier is the same
    CPU the near tier would otherwise cost nothing.
    """

    def __init__(self, store: DiskStore | RamStore, *, bandwidth: float | None = None) -> None:
        self._store, self._layout = store, store.layout
        self._timeline = Timeline(bandwidth) if bandwidth else None
        self._clock = WallClock()
        self._ready_at_s = 0.0
        self._buffer = None if isinstance(store, RamStore) else aligned(self._layout.nbytes)

    def begin(self, num_experts: int) -> None:
        """The emulated tier starts on so many experts now."""
        if self._timeline:
            nbytes = num_experts * self._store.shape.expert_nbytes
            self._ready_at_s = self._timeline.reserve(self._clock.now_s(), nbytes)

    def forward(self, module: nn.Module, layer: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        """One expert on its tokens, x [t, H] on the CPU -> [t, H]."""
        return expert_forward(module, self._layout.views(self._bytes(layer, expert)), x)

    def finish(self) -> None:
        """Return when the emulated tier would have what was begun."""
        self._clock.wait_until(self._ready_at_s)

    def conditions(self) -> dict[str, float]:
        return {"near_gbps": self._timeline.bandwidth / 1e9} if self._timeline else {}

    def _bytes(self, layer: int, expert: int) -> torch.Tensor:
        if isinstance(self._store, RamStore):
            return self._store.view(layer, expert)
        self._store.read(layer, expert, self._buffer)
        return self._buffer
