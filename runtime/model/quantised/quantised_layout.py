"""Layout of an expert that a checkpoint stores in few bits: packed in its slot as it was
published."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from artifacts.formats.base import BEYOND, Format, Stored
from artifacts.formats.integers.awq import as_stored, in_slot, is_turned, turn
from artifacts.formats.integers.order import ARRANGED, ORDER, arrange, index_of
from runtime.model.layout import PLAIN, ExpertLayout, Part, Spans, laid_out
from runtime.model.quantised.quantised_matrix import (
    Parts,
    QuantisedMatrix,
    joined,
    project_quantised,
)

PlacedParts = dict[str, Part]
"""The tensors of one matrix by role."""


def stored_part(name: str, source: int, role: str, form: Format, stored: Stored) -> Part:
    """Return the part of an expert that a tensor of a checkpoint becomes."""
    role, form, shape = in_slot(role, form, stored.shape)
    return Part(name, stored.dtype, shape, role=role, source=source, format=form)


@dataclass(frozen=True, slots=True)
class QuantisedLayout(ExpertLayout):
    """The parts of one expert in a slot, of which some are tensors of quantised matrices. `dtype`
    is the module's; `is_transposed` says whether its matrices are [in, out]."""

    is_plain: ClassVar[bool] = False
    codes: ClassVar[str] = "published"
    project: ClassVar[Callable[..., torch.Tensor]] = staticmethod(project_quantised)

    is_transposed: bool
    ordered: tuple[tuple[str, PlacedParts], ...] = field(default=(), compare=False)
    """Of the matrices whose codes are put into another order the names, and the tensors that
    `arrange` takes."""

    @classmethod
    def of(
        cls, parts: Iterable[Part], dtype: torch.dtype, *, is_transposed: bool
    ) -> "QuantisedLayout":
        """Lay out the parts in their order."""
        layout = cls(laid_out(parts), dtype, is_transposed)
        return replace(layout, ordered=tuple(_ordered(layout.matrices)))

    @property
    def format(self) -> str:
        """Name of the formats of its matrices, as `mxfp4`."""
        return " and ".join(dict.fromkeys(part.format.name for part in self.parts if part.format))

    @property
    def matrices(self) -> dict[str, list[PlacedParts]]:
        """Matrices that make up the rows of each parameter, by its name."""
        found: dict[str, dict[int, PlacedParts]] = {}
        for part in self.parts:
            found.setdefault(part.name, {}).setdefault(part.source, {})[part.role] = part
        return {name: list(by_source.values()) for name, by_source in found.items()}

    def views(self, buffer: torch.Tensor) -> Parts:
        """Return views of `buffer`, uint8 [nbytes] or longer, on any device: for each part the
        matrices that make up its rows, or its numbers if it is one tensor that is not quantised."""
        return {
            part: _plain([_views(buffer, placed) for placed in stored])
            for part, stored in self.matrices.items()
        }

    def weights(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the numbers of each part, as the module has them; copies, except for parts that
        are not quantised."""
        return {
            name: part
            if isinstance(part, torch.Tensor)
            else joined(part, self.dtype, is_transposed=self.is_transposed)
            for name, part in self.views(buffer).items()
        }

    def _stored(self, part: Part, buffer: torch.Tensor) -> torch.Tensor:
        # so that where groups follow each other the digest is of the bytes of the checkpoint
        if part.role == ORDER:
            return index_of(part.bytes_of(buffer).view(part.dtype)).view(torch.uint8)
        if part.format and is_turned(part.format):
            return as_stored(part.role, part.view(buffer)).flatten().view(torch.uint8)
        return part.bytes_of(buffer)

    def arrange(self, buffer: torch.Tensor) -> str | None:
        """Put the codes of an expert into the order of their groups, and AWQ's into GPTQ's; its
        stored bytes lie in `buffer`, uint8 [nbytes] or longer on the CPU. Return the fault of a
        part whose index leads beyond its groups; None if none does."""
        for name, placed in self.ordered:
            matrix = _views(buffer, placed)
            if is_turned(matrix.format):
                turn(matrix.tensors)
            elif not arrange(matrix.tensors, matrix.format.lacking):
                return f"{name} holds {BEYOND}"
        return None

    def fault(self, buffer: torch.Tensor, spans: Spans) -> str | None:
        """Return the fault of a part, with its name; None if all are sound."""
        for name, part in self.views(buffer).items():
            matrices = part if isinstance(part, list) else [QuantisedMatrix(None, {PLAIN: part})]
            if fault := next(filter(None, (matrix.fault() for matrix in matrices)), None):
                return f"{name} holds {fault}"
        return None


def _ordered(matrices: dict[str, list[PlacedParts]]) -> Iterator[tuple[str, PlacedParts]]:
    for name, stored in matrices.items():
        for placed in stored:
            form = next(iter(placed.values())).format
            if ORDER in placed or (form and is_turned(form)):
                yield name, {role: each for role, each in placed.items() if role in ARRANGED}


def _views(buffer: torch.Tensor, placed: PlacedParts) -> QuantisedMatrix:
    tensors = {role: part.view(buffer) for role, part in placed.items()}
    return QuantisedMatrix(next(iter(placed.values())).format, tensors)


def _plain(matrices: list[QuantisedMatrix]) -> list[QuantisedMatrix] | torch.Tensor:
    is_one = len(matrices) == 1 and matrices[0].format is None
    return matrices[0].tensors[PLAIN] if is_one else matrices
