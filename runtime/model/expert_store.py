"""Experts outside the fast tier: how one lies in its slot, and the stores that fill a slot by layer and expert."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from artifacts.errors import BadInput, OutOfResources
from artifacts.shape import Shape
from runtime.model.arithmetic import project
from runtime.model.checkpoint import Checkpoint, File, Shard, read_tensor
from runtime.model.direct_io import PAGE, DirectFile

ALIGNMENT = 64  # bytes; CPU kernels round differently on other borders, and results stop being bit-identical

Spans = tuple[tuple[int, int], ...]  # of a slot: bytes from start to stop


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter of one expert, in its module's own orientation; `offset` counts bytes inside the slot."""

    name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """How the parts of one expert lie in a slot: each on a 64-byte border, all of one dtype."""

    project: ClassVar[Callable[..., torch.Tensor]] = staticmethod(project)

    parts: tuple[Part, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> "ExpertLayout":
        """Lay out parameters of the given shapes (one expert's, without the expert dimension) in their order."""
        parts, offset = [], 0
        for name, shape in shapes.items():
            part = Part(name, shape, offset, prod(shape) * dtype.itemsize)
            parts.append(part)
            offset = round_up(offset + part.nbytes)
        return cls(tuple(parts), dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of a slot, a multiple of 64."""
        return round_up(self.parts[-1].offset + self.parts[-1].nbytes)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts by name as views of `buffer`, uint8 [nbytes] or longer, on any device; nothing is copied."""
        return {
            part.name: buffer[part.offset : part.offset + part.nbytes].view(self.dtype).view(part.shape)
            for part in self.parts
        }

    def several(self, part: Part, memory: torch.Tensor) -> torch.Tensor:
        """One part of several experts that follow each other in `memory`, uint8: [n, *shape]; nothing is copied."""
        return memory.view(self.dtype).view(-1, *part.shape)


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


class Layout(Protocol):
    """How an expert of one precision lies in a slot."""

    dtype: torch.dtype  # that most of it is stored in
    project: Callable[..., torch.Tensor]  # what `expert_forward` multiplies by it with

    @property
    def nbytes(self) -> int: ...

    def views(self, buffer: torch.Tensor) -> Mapping[str, object]: ...


class Reader(Protocol):
    """What reads experts of one precision, one at a time."""

    layout: Layout
    shape: Shape

    def read(self, layer: int, expert: int, out: torch.Tensor) -> None: ...


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


class RamStore:
    """The slow tier in RAM: every expert of `disk`, copied once into one aligned slab [L*E, nbytes].

    `pin` page-locks the slab for asynchronous copies to a GPU; `progress`, if given, hears how many experts are in.
    Raises OutOfResources when there is no room for the slab.
    """

    def __init__(self, disk: Reader, *, pin: bool = False, progress: Callable[[int], None] | None = None) -> None:
        self.layout, self.shape, self.is_pinned = disk.layout, disk.shape, pin
        stride = round_up(self.layout.nbytes)
        slab = aligned(self.shape.num_keys * stride, pin=pin).view(self.shape.num_keys, stride)
        self._experts = list(slab[:, : self.layout.nbytes].unbind())
        for key in range(self.shape.num_keys):
            disk.read(*divmod(key, self.shape.num_experts), slab[key])
            if progress is not None:
                progress(key + 1)

    def view(self, layer: int, expert: int) -> torch.Tensor:
        """The expert's bytes, uint8 [nbytes], where they lie."""
        return self._experts[layer * self.shape.num_experts + expert]

    def read(self, layer: int, expert: int, out: torch.Tensor) -> None:
        """Copy one expert into `out`, uint8 [nbytes] or longer."""
        fill(out, self.view(layer, expert))


def aligned(nbytes: int, *, pin: bool = False) -> torch.Tensor:
    """A new uint8 CPU tensor [nbytes] that starts on a border of pages, to which a device can write past the page
    cache, or page-locked on a 64-byte border if `pin`."""
    spare = 0 if pin else PAGE - ALIGNMENT
    try:
        buffer = torch.empty(nbytes + spare, dtype=torch.uint8, pin_memory=pin)
    except RuntimeError as error:
        kind = "page-locked memory" if pin else "memory"
        raise OutOfResources(f"no room for {nbytes / 2**30:.2f} GiB of {kind}: leave the experts on disk") from error
    assert buffer.data_ptr() % ALIGNMENT == 0, f"torch allocated at {buffer.data_ptr()}, not on a 64-byte border"
    first = -buffer.data_ptr() % PAGE if spare else 0
    return buffer[first : first + nbytes]


def fill(out: torch.Tensor, content: torch.Tensor) -> None:
    """Copy `content`, uint8, to the start of `out`. Slicing takes as long as copying a small expert."""
    (out if out.numel() == content.numel() else out[: content.numel()]).copy_(content)


def is_finite(values: torch.Tensor) -> bool:
    """Whether a floating tensor holds neither NaN nor infinity."""
    # Both survive the extremes; isfinite of everything would take 20 times as long and a mask in memory.
    return all(bool(extreme.isfinite()) for extreme in torch.aminmax(values))


def round_up(nbytes: int) -> int:
    """The next 64-byte border."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


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
