"""GPU backend of experts in the format in which the checkpoint publishes them, with its kernels."""

from collections.abc import Sequence

import torch

from runtime.control.plan import Place
from runtime.kernels.gates import Gate
from runtime.kernels.gpu.addressing import Numbers, gated_matrices
from runtime.kernels.gpu.total import Total
from runtime.kernels.load import kernels
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.layout import ExpertLayout
from runtime.model.quantised.stored_matrix import StoredMatrix


class GpuPublished:
    """Backend of experts in slots, at `starts`, counted in bytes from the beginning of the `arena`,
    uint8."""

    def __init__(
        self, layout: ExpertLayout, arena: torch.Tensor, starts: torch.Tensor, gate: Gate
    ) -> None:
        self._layout = layout
        self._arena = arena
        self._starts = starts
        self._places = starts.tolist()
        self._matrices = gated_matrices(layout, gate)

    def number(self, place: Place) -> int:
        return place.slot

    def starts(self, slots: Sequence[int]) -> torch.Tensor:
        """Return the offsets of these slots in the arena, in bytes."""
        return self._starts[torch.tensor(slots, device=self._starts.device)]

    def multiply(
        self,
        x: torch.Tensor,
        numbers: Numbers,
        y: torch.Tensor,
        *,
        starts: torch.Tensor | None = None,
        total: Total | None = None,
    ) -> None:
        """Do the same as `GpuForm.multiply`. `numbers` index `starts` if given, and slots
        otherwise. With `total` the outputs of one token are then added up."""
        starts = self._starts if starts is None else starts
        own = {"matrices": self._matrices, "total": total}
        kernels("gpu.experts.gated_published").multiply(x, numbers, starts, self._arena, y=y, **own)

    def weights(self, place: Place) -> dict[str, torch.Tensor]:
        """Return the dequantised expert at a place, as the module has it."""
        expert = self._arena[self._places[place.slot] :]
        matrices = self._matrices
        of_inner = (
            (matrices.gate,) if matrices.up is matrices.gate else (matrices.gate, matrices.up)
        )
        return self._dequantised(GATE_UP, expert, of_inner) | self._dequantised(
            DOWN, expert, (matrices.down,)
        )

    def _dequantised(
        self, name: str, expert: torch.Tensor, matrices: Sequence[StoredMatrix]
    ) -> dict[str, torch.Tensor]:
        """Return a dequantised part of the expert, with its bias; `matrices` are its rows."""
        dtype = self._layout.dtype
        first = matrices[0]
        shape = sum(matrix.num_outputs for matrix in matrices), first.num_inputs
        whole = torch.empty(shape, dtype=dtype, device=expert.device)
        for matrix, rows in zip(matrices, whole.split(first.num_outputs), strict=True):
            kernels("gpu.published").dequantise(expert, matrix, rows)
        found = {name: whole.mT if self._layout.is_transposed else whole}
        if first.bias is not None:
            found[f"{name}_bias"] = expert[first.bias :][: len(whole) * dtype.itemsize].view(dtype)
        return found
