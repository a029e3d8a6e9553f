"""The slow tier on disk: reads one expert at a time from a checkpoint's own files."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from artifacts.errors import BadInput
from artifacts.shape import Shape
from runtime.model.files.checkpoint import Checkpoint, File, RepeatedBytes, Shard, read_tensor
from runtime.model.files.direct_io import DirectFile
from runtime.model.layout import ExpertLayout, ExpertStore, Spans


@dataclass(frozen=True, slots=True)
class Extent:
    """Contiguous stored bytes of one expert, and their place in its slot, from `start` to `stop`,
    as `slot_dtype`.

    `swapped` is the stored shape if the slot has its first two dimensions swapped. Such bytes are
    always read whole: the place begins `skipped` numbers behind their first in the slot. `num_rows`
    is the number of rows if they fill every second row of the place, from the first on.
    """

    shard: Shard | RepeatedBytes
    dtype: torch.dtype
    offset: int
    nbytes: int
    start: int
    stop: int
    slot_dtype: torch.dtype
    swapped: tuple[int, ...] | None = None
    skipped: int = 0
    num_rows: int | None = None

    @property
    def is_copy(self) -> bool:
        """True if the place in the slot holds the stored bytes unchanged."""
        return self.dtype == self.slot_dtype and self.swapped is None and self.num_rows is None

    def within(self, start: int, stop: int) -> "Extent | None":
        """Return the part that belongs between `start` and `stop` of the slot, multiples of an
        element; None if none does."""
        assert self.num_rows is None, (
            "only experts that are packed have rows by turns, and these are read whole"
        )
        first = max(start, self.start)
        last = min(stop, self.stop)
        if first >= last:
            return None
        if self.swapped:
            skipped = self.skipped + (first - self.start) // self.slot_dtype.itemsize
            return replace(self, start=first, stop=last, skipped=skipped)
        # stored bytes for bytes of the slot
        scale = self.nbytes
        size = self.stop - self.start
        offset = self.offset + (first - self.start) * scale // size
        return replace(
            self, offset=offset, nbytes=(last - first) * scale // size, start=first, stop=last
        )

    def convert(self, file: File, out: torch.Tensor) -> None:
        """Read the numbers and write them to their place in the slot `out`."""
        values = read_tensor(file, self.offset, self.nbytes, self.dtype)
        place = out[self.start : self.stop].view(self.slot_dtype)
        if self.num_rows is not None:
            values = values.view(self.num_rows, -1)
            place.view(-1, values.shape[1])[::2].copy_(values)
        elif self.swapped is not None:
            place.copy_(
                values.view(self.swapped)
                .transpose(0, 1)
                .flatten()[self.skipped : self.skipped + len(place)]
            )
        else:
            place.copy_(values)


class DiskStore(ExpertStore):
    """Reads one expert at a time out of the checkpoint's own files and keeps nothing.

    `extents[key]` are the stored bytes of the expert `key = layer * E + expert`. Thread-safe.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: ExpertLayout,
        *,
        shape: Shape,
        extents: Sequence[Sequence[Extent]],
    ) -> None:
        assert len(extents) == shape.num_keys, (len(extents), shape)
        self.layout = layout
        self.shape = shape
        self._checkpoint = checkpoint
        self._extents = extents
        self._reads = [_Reads.of(expert) for expert in extents]
        self._checked: set[tuple[int, Spans]] = set()
        self._direct: dict[Path, DirectFile] = {}

    def direct(self) -> "DiskStore":
        """Return a store that bypasses the page cache. Raises BadInput where the file system cannot
        do so, and where another file has taken the name of one that is open."""
        store = copy(self)
        store._direct = {shard.path: DirectFile(shard.path) for shard in self._checkpoint.shards}
        for shard in self._checkpoint.shards:
            shard.check_in_place()
        return store

    def read(self, layer: int, expert: int, out: torch.Tensor, *, spans: Spans = ()) -> None:
        """Fill `out`, a uint8 CPU tensor [layout.nbytes] or longer, with one expert, or only these
        spans of it.

        Raises BadInput if the file has shrunk, or if bytes that are read for the first time are not
        finite.
        """
        key = layer * self.shape.num_experts + expert
        reads = _Reads.of(_within(self._extents[key], spans)) if spans else self._reads[key]
        target = memoryview(out.numpy())
        for run in reads.runs:
            self._file(run.shard).read_into(
                run.offset, [target[start:stop] for start, stop in run.spans]
            )
        for extent in reads.conversions:
            extent.convert(self._file(extent.shard), out)
        _refuse(layer, expert, self.layout.arrange(out))
        if (key, spans) not in self._checked:
            _refuse(layer, expert, self.layout.fault(out, spans or ((0, self.layout.nbytes),)))
            self._checked.add((key, spans))

    def read_kept(self, layer: int, expert: int, out: torch.Tensor) -> bool:
        """Fill `out` with a whole expert from the page cache, without waiting for the device.

        Return False, with `out` undefined, if the page cache lacks part of it or the expert was
        never read before.
        """
        key = layer * self.shape.num_experts + expert
        reads = self._reads[key]
        target = memoryview(out.numpy())
        if self._direct or reads.conversions or (key, ()) not in self._checked:
            return False
        for run in reads.runs:
            parts = [target[start:stop] for start, stop in run.spans]
            if not run.shard.read_kept(run.offset, parts):
                return False
        return self.layout.arrange(out) is None

    def variants(self) -> tuple[int, ...]:
        """Return the variant of the layout in which each layer has its first expert; none where all
        experts have one layout."""
        if not self.layout.variants:
            return ()
        numbers = bytearray(self.shape.num_layers)
        for layer in range(self.shape.num_layers):  # a slot begins with the number of its variant
            number = self._extents[layer * self.shape.num_experts][0].shard
            number.read_into(0, [memoryview(numbers)[layer : layer + 1]])
        return tuple(numbers)

    def places(self, layer: int, expert: int) -> list[tuple[Path, int, int]]:
        """Return the file, offset and bytes of each read that loads an expert."""
        reads = self._reads[layer * self.shape.num_experts + expert]
        return [
            (read.shard.path, read.offset, read.nbytes)
            for read in (*reads.runs, *reads.conversions)
        ]

    def check_unchanged(self) -> None:
        """Raise BadInput that names a file which was written into since it was opened. It costs one
        system call per file, so it is called once a pass."""
        self._checkpoint.check_unchanged()

    def close(self) -> None:
        """Close the files; reading afterwards is a bug."""
        self._checkpoint.close()

    def _file(self, shard: Shard | RepeatedBytes) -> File:
        return self._direct.get(shard.path, shard)


def _refuse(layer: int, expert: int, fault: str | None) -> None:
    """Raise BadInput if an expert has a fault."""
    if fault:
        raise BadInput(f"layer {layer}, expert {expert}: {fault}")


def num_reads(extents: Sequence[Extent]) -> int:
    """Return the number of reads that load an expert."""
    reads = _Reads.of(extents)
    return len(reads.runs) + len(reads.conversions)


@dataclass(frozen=True, slots=True)
class _Run:
    """Extents that follow each other in one file, read by one call into the spans of the slot."""

    shard: Shard | RepeatedBytes
    offset: int
    nbytes: int
    spans: Spans


@dataclass(frozen=True, slots=True)
class _Reads:
    """The reads that load an expert: runs of bytes as the slot has them, and extents that must be
    converted."""

    runs: tuple[_Run, ...]
    conversions: tuple[Extent, ...]

    @classmethod
    def of(cls, extents: Sequence[Extent]) -> "_Reads":
        copies = [extent for extent in extents if extent.is_copy]
        return cls(tuple(_runs(copies)), tuple(extent for extent in extents if not extent.is_copy))


def _runs(extents: Sequence[Extent]) -> list[_Run]:
    runs: list[_Run] = []
    for extent in sorted(extents, key=lambda extent: (extent.shard.path, extent.offset)):
        last = runs[-1] if runs else None
        if last and last.shard is extent.shard and last.offset + last.nbytes == extent.offset:
            spans = _joined(last.spans, extent)
            runs[-1] = _Run(last.shard, last.offset, last.nbytes + extent.nbytes, spans)
        else:
            runs.append(
                _Run(extent.shard, extent.offset, extent.nbytes, ((extent.start, extent.stop),))
            )
    return runs


def _joined(spans: Spans, extent: Extent) -> Spans:
    start, stop = spans[-1]
    if stop == extent.start:
        return (*spans[:-1], (start, extent.stop))
    return (*spans, (extent.start, extent.stop))


def _within(extents: Sequence[Extent], spans: Spans) -> list[Extent]:
    """Return the parts of the extents that belong to these spans of the slot."""
    parts = (extent.within(start, stop) for extent in extents for start, stop in spans)
    return [part for part in parts if part is not None]
