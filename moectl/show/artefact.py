"""An artefact in an open store, as the views of it read it."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from artifacts.shape import Shape
from artifacts.store.runs import StoredRun
from artifacts.store.store import Store
from moectl.show.render import Heatmap, Sheet

View = tuple[Sheet, Heatmap]


@dataclass(frozen=True, slots=True)
class Artefact:
    """An artefact in an open store: the run that wrote it, the shape of its model, and the layer
    asked for."""

    store: Store
    run: StoredRun
    shape: Shape
    layer: int | None
    verify: bool = False

    def read(self, table: str) -> pa.Table:
        return self.store.read(table, self.run.run_id)

    @property
    def size(self) -> tuple[int, int]:
        return self.shape.num_layers, self.shape.num_experts

    @property
    def layers(self) -> Sequence[int]:
        """The layer asked for, else all."""
        return range(self.shape.num_layers) if self.layer is None else [self.layer]
