"""The near tier: experts computed where they lie, by a thread of its own, while the fast tier computes what it
holds."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from runtime.clock import Timeline
from runtime.link import wait_until
from runtime.weights import DiskStore, RamStore, aligned

Forward = Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor]


class NearTier:
    """Reads experts in place from RAM, or from disk through a buffer of one expert.

    With `bandwidth` (bytes per second) an expert takes at least its bytes over it: on a machine whose fast tier is
    the same
    CPU the near tier would otherwise cost nothing.
    """

    def __init__(self, store: DiskStore | RamStore, *, bandwidth: float | None = None) -> None:
        self._store, self._layout = store, store.layout
        self._timeline = Timeline(bandwidth) if bandwidth else None
        # A new thread starts with torch's default number of threads, and another number rounds differently.
        self._worker = ThreadPoolExecutor(
            1, "moectl-near", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )
        self._buffer = None if isinstance(store, RamStore) else aligned(self._layout.nbytes)

    def submit(self, layer: int, expert: int, forward: Forward, x: torch.Tensor) -> "Future[torch.Tensor]":
        """Start `forward(weights, x)` with one expert's weights; x [t, H] on the CPU."""
        return self._worker.submit(self._run, layer, expert, forward, x)

    def _run(self, layer: int, expert: int, forward: Forward, x: torch.Tensor) -> torch.Tensor:
        ready_at_s = (
            self._timeline.reserve(time.perf_counter(), self._store.shape.expert_nbytes) if self._timeline else 0.0
        )
        with torch.inference_mode():
            y = forward(self._layout.views(self._bytes(layer, expert)), x)
        wait_until(ready_at_s)
        return y

    def _bytes(self, layer: int, expert: int) -> torch.Tensor:
        if isinstance(self._store, RamStore):
            return self._store.view(layer, expert)
        self._store.read(layer, expert, self._buffer)
        return self._buffer

    def conditions(self) -> dict[str, float]:
        return {"near_gbps": self._timeline.bandwidth / 1e9} if self._timeline else {}

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)
