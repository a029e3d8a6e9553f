"""Experts outside the fast tier: how one lies in its slot, and the stores that fill a slot by layer and expert."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import torch

from artifacts.errors import BadInput
from artifacts.shape import Shape
from runtime.model.checkpoint import Checkpoint, File, Shard, read_tensor
from runtime.model.direct_io import DirectFile
from runtime.model.layout import ExpertLayout, Spans, is_finite


@dataclass(frozen=True, slots=True)
class Piece:
    """Stored bytes of one expert and the place in its slot, `start` to `stop`, where they belong."""

    shard: Shard
    dtype: torch.dtype
    offset: int
    nbytes: int
    start: int
    stop: int

    def within(self, start: int, stop: int) -> "Piece | None":
        """What of it lies in so much of the slot, borders of elements; None if nothing does."""
        first, last = max(start, self.start), min(stop, self.stop)
        if first >= last:
            return None
        scale, size = self.nbytes, self.stop - self.start  # stored bytes for bytes of the slot
        offset = self.offset + (first - self.start) * scale // size
        return Piece(self.shard, self.dtype, offset, (last - first) * scale // size, first, last)


@dataclass(frozen=True, slots=True)
class _Run:
    """Pieces that follow each other in one file, read by one call into the spans of the slot."""

    shard: Shard
    offset: int
    nbytes: int
    spans: Spans


@dataclass(frozen=True, slots=True)
class _Reads:
    """What brings an expert: bytes as they are, and pieces of another dtype."""

    runs: tuple[_Run, ...]
    conversions: tuple[Piece, ...]

    @classmethod
    def of(cls, pieces: Sequence[Piece], dtype: torch.dtype) -> "_Reads":
        plain = [piece for piece in pieces if piece.dtype == dtype]
        return cls(tuple(_runs(plain)), tuple(piece for piece in pieces if piece.dtype != dtype))


class DiskStore:
    """The slow tier on disk: reads one expert at a time out of the checkpoint's own files and keeps nothing.

    `pieces[key]` says where the bytes of `key = layer * E + expert` lie. Thread-safe.
    """

    def __init__(
        self, checkpoint: Checkpoint, layout: ExpertLayout, *, shape: Shape, pieces: Sequence[Sequence[Piece]]
    ) -> None:
        assert len(pieces) == shape.num_keys, (len(pieces), shape)
        self.layout, self.shape = layout, shape
        self._checkpoint, self._pieces = checkpoint, pieces
        self._reads = [_Reads.of(own, layout.dtype) for own in pieces]
        self._checked: set[tuple[int, Spans]] = set()
        self._direct: dict[Path, DirectFile] = {}

    def direct(self) -> "DiskStore":
        """The same, past the page cache. Raises BadInput where the file system cannot."""
        found = copy(self)
        found._direct = {shard.path: DirectFile(shard.path) for shard in self._checkpoint.shards}
        return found

    def read(self, layer: int, expert: int, out: torch.Tensor, *, spans: Spans = ()) -> None:
        """Fill `out`, a uint8 CPU tensor [layout.nbytes] or longer, with one expert, or only these spans of it.

        Raises BadInput if the file has shrunk, or if what is read for the first time is not finite.
        """
        key = layer * self.shape.num_experts + expert
        reads = _Reads.of(_within(self._pieces[key], spans), self.layout.dtype) if spans else self._reads[key]
        target = memoryview(out.numpy())
        for run in reads.runs:
            self._file(run.shard).read_into(run.offset, [target[start:stop] for start, stop in run.spans])
        for piece in reads.conversions:
            values = read_tensor(self._file(piece.shard), piece.offset, piece.nbytes, piece.dtype)
            out[piece.start : piece.stop].view(self.layout.dtype).copy_(values)
        if (key, spans) not in self._checked:
            self._check_finite(layer, expert, out, spans or ((0, self.layout.nbytes),))
            self._checked.add((key, spans))

    def read_kept(self, layer: int, expert: int, out: torch.Tensor) -> bool:
        """The same for a whole expert without waiting for the device; False, and `out` holds anything, where the page
        cache lacks some of it, or it has never been read before."""
        key = layer * self.shape.num_experts + expert
        reads, target = self._reads[key], memoryview(out.numpy())
        if self._direct or reads.conversions or (key, ()) not in self._checked:
            return False
        return all(
            run.shard.read_kept(run.offset, [target[start:stop] for start, stop in run.spans]) for run in reads.runs
        )

    def close(self) -> None:
        """Close the files; reading afterwards is a bug."""
        self._checkpoint.close()

    def _file(self, shard: Shard) -> File:
        return self._direct.get(shard.path, shard)

    def _check_finite(self, layer: int, expert: int, buffer: torch.Tensor, spans: Spans) -> None:
        for part in self.layout.parts:
            for start, stop in _overlaps(spans, part.offset, part.offset + part.nbytes):
                if not is_finite(buffer[start:stop].view(self.layout.dtype)):
                    raise BadInput(
                        f"layer {layer}, expert {expert}: {part.name} holds NaN or infinity, the checkpoint is damaged"
                    )


def num_reads(pieces: Sequence[Piece], dtype: torch.dtype) -> int:
    """Reads that bring an expert as `dtype`: places of the files where its bytes lie."""
    reads = _Reads.of(pieces, dtype)
    return len(reads.runs) + len(reads.conversions)


def _runs(pieces: Sequence[Piece]) -> list[_Run]:
    runs: list[_Run] = []
    for piece in sorted(pieces, key=lambda piece: (piece.shard.path, piece.offset)):
        last = runs[-1] if runs else None
        if last and last.shard is piece.shard and last.offset + last.nbytes == piece.offset:
            spans = _joined(last.spans, piece)
            runs[-1] = _Run(last.shard, last.offset, last.nbytes + piece.nbytes, spans)
        else:
            runs.append(_Run(piece.shard, piece.offset, piece.nbytes, ((piece.start, piece.stop),)))
    return runs


def _joined(spans: Spans, piece: Piece) -> Spans:
    start, stop = spans[-1]
    if stop == piece.start:
        return (*spans[:-1], (start, piece.stop))
    return (*spans, (piece.start, piece.stop))


def _within(pieces: Sequence[Piece], spans: Spans) -> list[Piece]:
    """What of the pieces lies in these spans of the slot."""
    parts = (piece.within(start, stop) for piece in pieces for start, stop in spans)
    return [part for part in parts if part is not None]


def _overlaps(spans: Spans, first: int, last: int) -> Iterator[tuple[int, int]]:
    for start, stop in spans:
        if max(start, first) < min(stop, last):
            yield max(start, first), min(stop, last)
