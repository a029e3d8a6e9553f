"""Outputs that experts add to their layer on the calibration text: workers compute them, the
command adds them up.

The next layers' inputs depend on every expert of this one, and on the order in which their outputs
are added. Workers write the outputs to files; the sum takes them in the order of experts, so that
its bits do not depend on who computed what, or when.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from artifacts.common.files import as_problem
from profilers.quantise.calibration import LayerInputs, LayerTokens, Weights
from profilers.quantise.lockstep import LayerBatch
from runtime.model.arithmetic import accumulate, expert_forward, weigh


@dataclass(frozen=True, slots=True)
class OutputRows:
    """The file for an expert's outputs [n, H] in the model's type, batch after batch, and by batch
    the rows of the layer's inputs that they are of."""

    path: Path
    batches: tuple[np.ndarray, ...]

    def write(
        self, module: nn.Module, weights: Weights, inputs: LayerInputs, device: torch.device
    ) -> None:
        """Compute them, one batch at a time as the model does, and write them. Raises
        OutOfResources for a full disk."""
        try:
            with self.path.open("wb") as file:
                for rows in self.batches:
                    if len(rows):
                        y = expert_forward(module, weights, inputs.stored(rows).to(device))
                        file.write(y.cpu().contiguous().view(torch.uint8).numpy())
        except OSError as error:
            raise as_problem(error, self.path) from error


class LayerSum:
    """The sum of a layer's experts on every batch; of the last layer, whose sum nothing needs, on
    no batch. `missing` lists the experts that are still to be added."""

    def __init__(
        self, arrived: Sequence[LayerBatch], tokens: LayerTokens, folder: Path, dtype: torch.dtype
    ) -> None:
        self._arrived = arrived
        self._tokens = tokens
        self._folder = folder
        self._sums = [torch.zeros_like(batch.hidden, dtype=dtype) for batch in arrived]
        self._written: set[int] = set()
        self.missing = (
            sorted({expert for assigned in tokens.assigned for expert in assigned})
            if arrived
            else []
        )

    def wanted(self, expert: int) -> OutputRows | None:
        """Return the outputs that a worker must write for an expert; None unless they are still
        missing, as for an expert that no token selected."""
        return (
            OutputRows(self._path(expert), self._tokens.by_batch(expert))
            if expert in self.missing
            else None
        )

    def add(self, expert: int) -> None:
        """Add an expert whose outputs are written, as soon as all before it are added."""
        self._written.add(expert)
        while self.missing and self.missing[0] in self._written:
            self._add(self.missing.pop(0))

    def _add(self, expert: int) -> None:
        path = self._path(expert)
        place = 0
        outputs = torch.from_numpy(np.fromfile(path, np.uint8)).view(self._arrived[0].hidden.dtype)
        outputs = outputs.view(-1, self._arrived[0].hidden.shape[1])
        for batch, assigned, out in zip(
            self._arrived, self._tokens.assigned, self._sums, strict=True
        ):
            if expert in assigned:
                own = outputs[place : (place := place + len(assigned[expert].tokens))].to(
                    out.device
                )
                accumulate(out, weigh(own, batch.weights, assigned[expert]), assigned[expert])
        path.unlink()

    def _path(self, expert: int) -> Path:
        return self._folder / f"{expert}.outputs"

    def totals(self) -> list[torch.Tensor]:
        """The output of the layer for each batch, [T, H]."""
        assert not self.missing, f"{self.missing} are not added"
        return [
            out.to(batch.hidden.dtype) for batch, out in zip(self._arrived, self._sums, strict=True)
        ]
