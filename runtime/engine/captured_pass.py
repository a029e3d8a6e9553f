"""One pass of a model as CUDA graphs: a single one, or pieces between which the host acts."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from runtime.backends.host_copy import Letter
from runtime.engine.routers import Watcher
from runtime.model.open import MoeLayer

Launch = Callable[[MoeLayer, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Queues a layer's experts: hidden [1, H], ids and weights [1, K] -> [1, H]."""


@dataclass(frozen=True, slots=True, eq=False)
class Seam:
    """Gap between two graphs, in which the host has the experts of `layer` computed. The first
    graph leaves their input in `given` and tells the host by `letter`; the second graph reads their
    output from `out`."""

    layer: MoeLayer
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    letter: Letter
    out: torch.Tensor


class CapturedPass:
    """Graphs that are captured one after another, and replayed in the same order. They share one
    pool of memory: the tensors that a graph leaves there may be overwritten by a later graph, never
    by an earlier one.

    With `launch` the experts are part of the graph, which is then a single one; otherwise each
    layer's are a seam. `chosen` has the ids [1, K] of each layer.
    """

    def __init__(self, watcher: Watcher, launch: Launch | None) -> None:
        self._watcher = watcher
        self._launch = launch
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._seams: list[Seam] = []
        self.chosen: list[torch.Tensor] = []
        self.output: object = None

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def capture(
        self, forward: Callable[[], object], stream: torch.cuda.Stream, end: Callable[[], None]
    ) -> None:
        """Capture the work that `forward` and then `end` queue; the former calls `experts` for each
        layer. Nothing is computed. Raises whatever the model or the driver raises where the host
        would have to wait for the device."""
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._begin()
            try:
                self.output = forward()
                end()
                self._graphs[-1].capture_end()
            except BaseException:
                self._abandon(stream.device)
                raise

    def experts(
        self, layer: MoeLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Capture the experts of a layer, and return the tensor [1, H] from which their output is
        read. With `launch` they become part of the graph; otherwise the graph ends here, at a
        seam."""
        self.chosen.append(ids)
        if self._launch is not None:
            return self._launch(layer, hidden, ids, weights)
        letter = self._watcher.send(layer.index, ids, weights)
        self._graphs[-1].capture_end()
        with torch.inference_mode(False):
            out = torch.empty_like(hidden)  # outside the pool: it is written between two graphs
        self._seams.append(Seam(layer, (hidden, ids, weights), letter, out))
        self._begin()
        return out

    def replay(self, experts: Launch) -> None:
        """Queue the whole pass again; `experts` computes the experts of each seam."""
        for graph, seam in zip(self._graphs, self._seams, strict=False):
            seam.letter.forget()
            graph.replay()
            self._watcher.expect(seam.letter)
            seam.out.copy_(experts(seam.layer, *seam.given))
        self._graphs[-1].replay()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # the link's threads go on
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graphs.append(graph)

    def _abandon(self, device: torch.device) -> None:
        """End a capture that failed. The driver may raise the error again; without this, torch's
        allocator would go on asking the graph which memory is its own, long after the graph is
        gone."""
        try:
            self._graphs[-1].capture_end()
        except RuntimeError:
            with suppress(RuntimeError):  # a later torch does it before it raises
                torch._C._cuda_endAllocateToPool(device.index, self._pool)
