"""Experts on a GPU in the format in which the checkpoint publishes them, with their kernels."""

from collections.abc import Sequence

import torch

from runtime.control.plan import Place
from runtime.kernels.gpu.stored_matrix import gated_matrices
from runtime.kernels.load import kernels
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.quantised_layout import QuantisedLayout


class GpuPublished:
    """Experts in slots, at `starts`, counted in bytes from the beginning of the `arena`, uint8."""

    def __init__(self, layout: QuantisedLayout, arena: torch.Tensor, starts: torch.Tensor) -> None:
        self._layout, self._arena, self._starts = layout, arena, starts
        self._places, self._matrices = starts.tolist(), gated_matrices(layout)

    def number(self, place: Place) -> int:
        return place.slot

    def starts(self, slots: Sequence[int]) -> torch.Tensor:
        """Where these slots begin."""
        return self._starts[torch.tensor(slots, device=self._starts.device)]

    def multiply(
        self, x: torch.Tensor, numbers: torch.Tensor, y: torch.Tensor, *, starts: torch.Tensor | None = None
    ) -> None:
        """As `GpuForm.multiply`; `numbers` index `starts` if given, and slots otherwise."""
        starts = self._starts if starts is None else starts
        kernels("gpu.gated_published").multiply(x, numbers, starts, self._arena, matrices=self._matrices, y=y)

    def weights(self, place: Place) -> dict[str, torch.Tensor]:
        """The dequantised expert at a place, as the module has it."""
        gate, up, up_first, down = self._matrices
        expert, own = (
            self._arena[self._places[place.slot] :],
            {"dtype": self._layout.dtype, "device": self._arena.device},
        )
        inner = torch.empty(2 * down.num_inputs, gate.num_inputs, **own)
        out = torch.empty(down.num_outputs, down.num_inputs, **own)
        dequantise = kernels("gpu.published").dequantise
        dequantise(expert, gate, inner)
        if not up_first:
            dequantise(expert, up, inner[gate.num_outputs :])
        dequantise(expert, down, out)
        return {GATE_UP: inner, DOWN: out}
