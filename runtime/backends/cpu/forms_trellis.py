"""CPU backend of replicas in trellis codes in RAM, with kernels for one token."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from artifacts.quantisation.trellis import trellis
from artifacts.quantisation.widths import Width
from runtime.backends.cpu.form import CpuForm, LayerForm, TokenOperands
from runtime.control.plan import Place
from runtime.kernels.load import kernels
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.tiers.replica_layouts import TrellisLayout
from runtime.tiers.shadow_replicas import Shadows


class CpuTrellis(CpuForm):
    """Backend of replicas in trellis codes, of any width in `layouts`. One call takes all replicas
    of a token, and rotates the token once."""

    def __init__(self, layouts: Mapping[Width, TrellisLayout], dtype: torch.dtype) -> None:
        self._functions = kernels("cpu.replicas.trellis_vectors").functions()
        self._rows = {bits: row for row, bits in enumerate(layouts)}
        sizes = []
        offsets = np.array([_coded_offsets(layout) for layout in layouts.values()])
        # [W, 2, 4]
        self._are_there = offsets >= 0
        self._offsets = np.maximum(offsets, 0)
        for layout in layouts.values():
            matrices = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8))
            inner, down = (matrices[name] for name in (GATE_UP, DOWN))
            sizes.append(
                [kernels("cpu.replicas.trellis").sizes_of(matrix) for matrix in (inner, down)]
            )
        self._sizes = np.array(sizes)  # [W, 2, 5]
        rotation = kernels("cpu.replicas.rotation").rotation
        digits = kernels("cpu.replicas.trellis").num_digits(dtype)
        outer, back = (rotation(down.num_outputs, is_back=is_back) for is_back in (False, True))
        acts = rotation(down.num_inputs, is_back=False)
        self._rotations = outer.signs, acts.signs, outer.odd, back.odd, acts.odd, digits
        self._nbytes = max(layout.nbytes for layout in layouts.values())

    def of_absent(self) -> LayerForm:
        """Return the layout for the kernel of a whole layer where experts have only replicas."""
        nowhere = kernels("cpu.linear").PLAIN, 0
        return LayerForm(
            len(self._rotations[0]), len(self._rotations[1]), (nowhere,) * 3, self._nbytes
        )

    def of_layers(self, shadows: Shadows | None, num_layers: int, num_experts: int) -> tuple:
        """Return the resident replicas of all experts [L, E] as `runtime.kernels.cpu.whole_layer`
        takes them; without `shadows` tables of which no row is of a replica."""
        keys = range(num_layers * num_experts)
        widths = shadows.widths if shadows else [*self._rows][:1] * len(keys)
        starts = [shadows.address(key) if shadows else 0 for key in keys]
        tables = (
            table.reshape(num_layers, num_experts, *table.shape[1:])
            for table in self.tables(widths, starts)
        )
        return self._functions, *tables, self._rotations

    def multiply(self, places: Sequence[Place], starts: list[int], operands: TokenOperands) -> None:
        widths = [place.bits for place in places] or [*self._rows][:1] * len(starts)
        tables = self.tables(widths, starts)
        kernels("cpu.replicas.gated_trellis").add(
            self._functions, *tables, self._rotations, *operands
        )

    def tables(
        self, widths: Sequence[Width], starts: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return addresses [n, 2, 4] and sizes [n, 2, 5] of replicas."""
        rows = [self._rows[bits] for bits in widths]
        return self._are_there[rows] * np.array(starts)[:, None, None] + self._offsets[
            rows
        ], self._sizes[rows]


def _coded_offsets(layout: TrellisLayout) -> np.ndarray:
    """Return the offsets of the parts of both matrices in a replica, [2, 4]; -1 for a part that is
    not there."""
    matrices = [layout.of(name) for name in (GATE_UP, DOWN)]
    return np.array(
        [
            [parts[role].offset if role in parts else -1 for role in trellis.PARTS]
            for parts in matrices
        ]
    )
