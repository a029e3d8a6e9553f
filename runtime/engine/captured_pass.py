"""One pass of a model as CUDA graphs: a single one, or pieces between which the host acts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.backends.host_copy import Letter
from runtime.backends.streams import GraphSequence
from runtime.engine.routers import Watcher
from runtime.model.open import MoeLayer

Launch = Callable[[MoeLayer, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Queues a layer's experts: hidden [T, H], ids and weights [T, K] -> [T, H]."""


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
    """The graphs of one pass. With `launch` the experts are part of the graph, which is then a
    single one; otherwise each layer's are a seam. `chosen` has the ids [T, K] of each layer. The
    memory is of `pool`."""

    def __init__(self, watcher: Watcher, launch: Launch | None, pool: object) -> None:
        self._watcher = watcher
        self._launch = launch
        self._sequence = GraphSequence(pool)
        self._seams: list[Seam] = []
        self.chosen: list[torch.Tensor] = []
        self.output: object = None

    @property
    def num_graphs(self) -> int:
        return len(self._sequence.graphs)

    def capture(
        self, forward: Callable[[], object], stream: torch.Stream, end: Callable[[], None]
    ) -> None:
        """Capture the work that `forward` and then `end` queue; the former calls `experts` for each
        layer. Nothing is computed. Raises whatever the model or the driver raises where the host
        would have to wait for the device."""
        with self._sequence.capturing(stream):
            self.output = forward()
            end()

    def experts(
        self, layer: MoeLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Capture the experts of a layer, and return the tensor [T, H] from which their output is
        read. With `launch` they become part of the graph; otherwise the graph ends here, at a
        seam."""
        self.chosen.append(ids)
        if self._launch is not None:
            return self._launch(layer, hidden, ids, weights)
        letter = self._watcher.send(layer.index, ids, weights)
        self._sequence.end()
        with torch.inference_mode(False):
            out = torch.empty_like(hidden)  # outside the pool: it is written between two graphs
        self._seams.append(Seam(layer, (hidden, ids, weights), letter, out))
        self._sequence.begin()
        return out

    def replay(self, experts: Launch) -> None:
        """Queue the whole pass again; `experts` computes the experts of each seam."""
        graphs = self._sequence.graphs
        for graph, seam in zip(graphs, self._seams, strict=False):
            seam.letter.forget()
            graph.replay()
            self._watcher.expect(seam.letter)
            seam.out.copy_(experts(seam.layer, *seam.given))
        graphs[-1].replay()
