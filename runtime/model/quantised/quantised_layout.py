"""Layout of an expert that a checkpoint stores in few bits: packed in its slot as it was
published."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar, NamedTuple

import torch

from artifacts.formats.base import BEYOND, Format, Stored
from artifacts.formats.integers.awq import as_stored, in_slot, is_turned, turn
from artifacts.formats.integers.order import ARRANGED, ORDER, arrange, index_of
from runtime.model.layout import Spans, round_up
from runtime.model.quantised.quantised_matrix import (
    PLAIN,
    Parts,
    QuantisedMatrix,
    joined,
    project_quantised,
)


class Piece(NamedTuple):
    """One stored tensor of an expert, in its role in the format of a matrix. `source` counts the
    matrices that make up the rows of one part of the module. `format` is None for numbers as they
    are."""

    part: str
    source: int
    role: str
    format: Format | None
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of_stored(cls, part: str, source: int, role: str, form: Format, stored: Stored) -> "Piece":
        """Return the piece of a slot that a tensor of a checkpoint becomes."""
        role, form, shape = in_slot(role, form, stored.shape)
        return cls(part, source, role, form, stored.dtype, shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


PlacedPieces = dict[str, tuple[Piece, int]]
"""The pieces of one matrix by role, each with the byte at which it begins in a slot."""


@dataclass(frozen=True, slots=True)
class QuantisedLayout:
    """The pieces of one expert in a slot, each 64-byte aligned. `dtype` is the module's;
    `is_transposed` says whether its matrices are [in, out]."""

    is_plain: ClassVar[bool] = False
    codes: ClassVar[str] = "published"

    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...]
    dtype: torch.dtype
    is_transposed: bool
    ordered: tuple[tuple[str, PlacedPieces], ...] = field(default=(), compare=False)
    """Of the matrices whose codes are put into another order the parts, and the pieces that
    `arrange` takes."""

    @classmethod
    def of(
        cls, pieces: Sequence[Piece], dtype: torch.dtype, *, is_transposed: bool
    ) -> "QuantisedLayout":
        """Lay out the pieces in their order."""
        offsets = []
        offset = 0
        for piece in pieces:
            offsets.append(offset)
            offset = round_up(offset + piece.nbytes)
        layout = cls(tuple(pieces), tuple(offsets), dtype, is_transposed)
        return replace(layout, ordered=tuple(_ordered(layout.matrices)))

    @property
    def format(self) -> str:
        """Name of the formats of its matrices, as `mxfp4`."""
        return " and ".join(
            dict.fromkeys(piece.format.name for piece in self.pieces if piece.format)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of a slot, a multiple of 64."""
        return round_up(self.offsets[-1] + self.pieces[-1].nbytes)

    @property
    def matrices(self) -> dict[str, list[PlacedPieces]]:
        """Matrices that make up the rows of each part, by part."""
        found: dict[str, dict[int, PlacedPieces]] = {}
        for piece, offset in zip(self.pieces, self.offsets, strict=True):
            found.setdefault(piece.part, {}).setdefault(piece.source, {})[piece.role] = (
                piece,
                offset,
            )
        return {part: list(by_source.values()) for part, by_source in found.items()}

    @property
    def project(self) -> Callable[..., torch.Tensor]:
        return project_quantised

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

    def digest(self, buffer: torch.Tensor) -> str:
        """Return the sha256 of an expert in `buffer`, uint8 [nbytes] or longer on the CPU, without
        the bytes between its pieces: the same wherever the checkpoint keeps the expert."""
        digest = hashlib.sha256()
        for piece, offset in zip(self.pieces, self.offsets, strict=True):
            content = buffer[offset : offset + piece.nbytes]
            # so that where groups follow each other it is of the bytes of the checkpoint
            if piece.role == ORDER:
                content = index_of(content.view(piece.dtype)).view(torch.uint8)
            elif piece.format and is_turned(piece.format):
                words = as_stored(piece.role, content.view(piece.dtype).view(piece.shape))
                content = words.flatten().view(torch.uint8)
            digest.update(memoryview(content.numpy()))
        return digest.hexdigest()

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


def _ordered(matrices: dict[str, list[PlacedPieces]]) -> Iterator[tuple[str, PlacedPieces]]:
    for part, stored in matrices.items():
        for placed in stored:
            form = next(piece.format for piece, _ in placed.values())
            if ORDER in placed or (form and is_turned(form)):
                yield part, {role: each for role, each in placed.items() if role in ARRANGED}


def _views(buffer: torch.Tensor, placed: PlacedPieces) -> QuantisedMatrix:
    tensors = {
        role: buffer[offset : offset + piece.nbytes].view(piece.dtype).view(piece.shape)
        for role, (piece, offset) in placed.items()
    }
    return QuantisedMatrix(next(piece.format for piece, _ in placed.values()), tensors)


def _plain(matrices: list[QuantisedMatrix]) -> list[QuantisedMatrix] | torch.Tensor:
    is_one = len(matrices) == 1 and matrices[0].format is None
    return matrices[0].tensors[PLAIN] if is_one else matrices
